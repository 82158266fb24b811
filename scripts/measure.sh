#!/usr/bin/env bash
# The measurements of docs/benchmarks.md: mostly trainings of 4 ranks under mpirun, one line of OUT/runs.jsonl a run, then a
# table. A training that has its line is not repeated. OUT is docs/results/EXPERIMENT unless given; DATA_DIR holds
# cifar-10-batches-py/. Afterwards figures.py draws the figures.
#   usage: measure.sh EXPERIMENT [DATA_DIR] [OUT]
# Accuracy on digits:
#   digits           dense, fp16 and three methods                  digits-mp2     MP2, its prediction, and baselines
# Accuracy on CIFAR-10 (DATA_DIR):
#   cifar10          dense, fp16, IWP at several densities, MP2     cifar10-short  learning rate and momentum at 1/64
#   cifar10-budgets  every method at 1/64 and 1/16 of the bytes     cifar10-vgg11  MP2 and dense, 2 ranks
#   cifar10-signs    DeMo for 4 and 10 epochs                       cifar10-muon   local steps of Muon
#   vit              a vision transformer with AdamW, and DeMo      vit-muon       the same with Muon
# Bits per byte on text, 4 simulated ranks:
#   gpt-adamw        every method, local steps, learning rates      gpt-ranks      dense and DeMo with 8 and 16 ranks
#   gpt-muon         Muon: dense, local steps in few bits           gpt-muon-ranks the same with 16 and 32 ranks
#   gpt-sizes        the same with 0.07 M and 1 M parameters        gpt-long       the same with 10,000 steps
#   gpt-recipe       README's program: torch's Muon and AdamW, by recipes.low_bit, and dense
#   gpt-nodes        DeMo on 4 nodes of 4 ranks
#   nanogpt          nanoGPT's own train.py on 4 ranks, changed as docs/local_steps.md says (DATA_DIR: a clone of it, data prepared)
#   gpt-tune         a pretrained GPT tags bytes: AdamW, and methods
# Steps of ResNet-50's shapes on four hosts, by the rate of their links (root):
#   exchange-ring    Horovod by Open MPI's ring, IWP and DeMo       exchange-methods   every method at 1 Gbit/s
#   exchange-buckets IWP with other bucket sizes                    exchange-nodes     two hosts of two ranks, flat and on two levels
#   exchange-hsdp    FSDP2 on two hosts of two ranks                exchange-pause     computing is a pause; local steps, fragments
#   exchange-bits    gradients in 8 and 4 bits, and fp16, on DDP
#   exchange-share   how much of the time is computing, on links of 5 Gbit/s to 50 Mbit/s, and with a delay, ten times slowed down
# Time to an accuracy, on four hosts with slow links (root, DATA_DIR): race-resnet20, race-vgg11. Others:
#   growth           time and memory as network and ranks grow  memory         what every method holds, and its peak
#   gradients        errors against bits, on recorded gradients and differences of weights (DATA_DIR)
set -euo pipefail
cd "$(dirname "$0")/.."
experiment=${1:-}
case $experiment in
  cifar10* | vit* | race-resnet20 | race-vgg11 | nanogpt) data=${2:?DATA_DIR} out=${3:-docs/results/$experiment} ;;
  gradients) data=${2:?DATA_DIR} out=${3:-results/gradients} ;;
  digits* | gpt-* | exchange* | growth | memory) out=${2:-docs/results/$experiment} ;;
  *) sed -n '2,29s/^# \?//p' scripts/measure.sh >&2; exit 2 ;;
esac
bash scripts/setup.sh
mkdir -p "$out"
python=.venv/bin/python

# What compressed runs have in common where bytes are compared.
rest=(--dense-values fp16)
ours=(--momentum-correction "${rest[@]}")
# Waiting MPI threads sleep instead of yielding: with more threads than cores, which is faster depends on method and network.
sleep=(OMPI_MCA_threads_pthreads_yield_strategy=nanosleep OMPI_MCA_threads_pthreads_nanosleep_time=100000)
# Open MPI ignores the algorithm without the first.
ring=(OMPI_MCA_coll_tuned_use_dynamic_rules=1 OMPI_MCA_coll_tuned_allreduce_algorithm=4)
# Accuracies that dense reaches in the few epochs of a race of images.
declare -A target=([race-resnet20]=0.7 [race-vgg11]=0.6)

common=() launcher=()
one() {  # NAME METHOD ARGUMENTS...: a run with the common arguments
  local name=$1 method=$2; shift 2
  grep -qsF "{\"name\":\"$name\"," "$out/runs.jsonl" ||
    bash scripts/run.sh "${launcher[@]}" "${ranks:-4}" scripts/experiments/train.py --json "$out/runs.jsonl/$name" "${common[@]}" --compression "$method" "$@"
}

# Options of bench_exchange.py and race.py: settings for the ranks of one method.
environments=()
having() {  # LABEL NAME=VALUE...
  local label=$1 setting; shift
  for setting in "$@"; do environments+=(--environment "$label:$setting"); done
}

exchange() { "$python" scripts/lab/bench_exchange.py --shapes resnet50 --hosts 4 "$@" "${environments[@]}"; }

steps_by_rate() {  # ARGUMENTS...: one run where a dense step takes 20 s
  exchange --rate none,10gbit,1gbit --runs 3 --max-seconds 60 --json "$out/runs.jsonl/resnet50-none-10gbit-1gbit" "$@"
  exchange --rate 100mbit --max-seconds 60 --json "$out/runs.jsonl/resnet50-100mbit" "$@"
}

at_equal_bytes() {  # densities such that all bytes together, uncompressed tensors included, are a share of dense
  local share density method
  one none none
  one fp16 fp16
  for share in "64 1/31.9 1/67.9 1/29.3 1/18.2 1/362.7" "16 1/5.65 1/11.07 1/5.58 1/3.44 1/68.57"; do
    read -ra density <<<"$share"
    share=${density[0]}
    one "$share-iwp-lanes4" iwp "${ours[@]}" --density "${density[1]}"
    one "$share-iwp-fp16" iwp "${ours[@]}" --density "${density[2]}" --values fp16
    one "$share-fft" fft "${ours[@]}" --density "${density[3]}"
    # Without indices.
    for method in mipd slimdp mp2; do one "$share-$method" "$method" "${ours[@]}" --density "${density[4]}"; done
    for method in topk dgc; do one "$share-$method" "$method" "${ours[@]}" --density "${density[5]}"; done
  done
  # Methods with a ratio of their own.
  one qsgd-4 qsgd "${rest[@]}" --bits 4
  one terngrad terngrad "${rest[@]}"
}

simulate() {  # ROW RATES BUDGETS OPTIONS ARGUMENTS...: a row by compare.py; its ranks in one process, on one core
  local row=$1 rates=$2 budgets=$3 options=$4; shift 4
  "$python" scripts/experiments/compare.py --simulate --ranks "${ranks:-4}" --out "${folder:-$out}" --methods "$row" --lrs "$rates" \
    ${budgets:+--budgets "$budgets"} ${options:+--option "$row:$options"} "$@" >/dev/null
}

gpt() {  # ROW RATES BUDGETS OPTIONS ARGUMENTS...: 1,500 steps of 32 windows
  simulate "$@" --data text --model "${model:-gpt}" --epochs "${epochs:-15}" -- --optimizer "${optimizer:-adamw}" --batch-size "${batch:-8}" --eval-every "${every:-5}"
}

few_bits() {  # PERIOD BITS ARGUMENTS...: options of local steps in few bits, with error feedback
  echo "--local-steps $1 --bits $2 --dense-values fp16 --unsent buffer ${*:3}"
}

local_muon() {  # NAME PERIOD BITS RATES ARGUMENTS...; BITS may be followed by options
  local name=$1 period=$2 bits=$3 rates=$4; shift 4
  optimizer=muon gpt "quantized@$name" "$rates" "" "$(few_bits "$period" "$bits")" "$@"
}

dense_and_local_muon() {  # BATCH DENSE_RATES RATES: dense training is one rank's, with the batch of four
  ranks=1 batch=$((4 * $1)) optimizer=muon gpt none@muon "$2" "" ""
  batch=$1 local_muon 45 3 2 "$3"
  report "$folder"
}

report() {  # FOLDER
  { printf '# %s\n\n' "$(realpath --relative-to "$out/.." "$1")"; "$python" scripts/experiments/table.py "$1/runs.jsonl"; } >"$1/table.md"
}

images=(--data-dir "${data:-}" --batch-size 32 --amp bf16)

resnet20=(--data cifar10 --data-dir "${data:-}" --model resnet20 --channels-last --amp bf16)
case $experiment in
  digits)
    for seed in 0 1 2; do
      common=(--data digits --model cnn --epochs 12 --batch-size 16 --lr 0.1 --seed "$seed")
      one "none-$seed" none
      one "fp16-$seed" fp16
      one "iwp-64-$seed" iwp --density 1/64 --values fp16
      one "iwp-32-lanes4-$seed" iwp
      one "fft-32-lanes4-$seed" fft
      one "mipd-16-lanes4-$seed" mipd --density 1/16
    done
    ;;
  cifar10)
    common=("${resnet20[@]}" --epochs 10 --lr 0.3)
    one none none
    for share in 64 32 16; do
      one "iwp-$share" iwp --density "1/$share" --values fp16 --momentum-correction --no-block-means
    done
    one iwp-64-plain iwp --density 1/64 --values fp16 --no-block-means
    one mp2-9 mp2 "${ours[@]}"
    one fp16 fp16
    ;;
  cifar10-short)
    common=("${resnet20[@]}" --epochs 4)
    iwp=(iwp --density 1/64 --values fp16 --no-block-means)
    for lr in 0.1 0.3; do
      one "none-$lr" none --lr "$lr"
      one "iwp-64-plain-$lr" "${iwp[@]}" --lr "$lr"
    done
    iwp+=(--momentum-correction --lr 0.3)
    one iwp-64-0.3 "${iwp[@]}"
    one iwp-64-0.3-one-leader "${iwp[@]}" --leaders 1
    one iwp-64-0.3-no-random "${iwp[@]}" --explore 0
    ;;
  cifar10-budgets)
    common=("${resnet20[@]}" --epochs 4 --lr 0.3)
    at_equal_bytes
    # More seeds of dense and of the best.
    for seed in 1 2; do
      one "none-$seed" none --seed "$seed"
      for pair in "iwp-lanes4 iwp 1/31.9" "fft fft 1/29.3" "topk topk 1/362.7" "dgc dgc 1/362.7"; do
        read -r name method density <<<"$pair"
        one "64-$name-$seed" "$method" "${ours[@]}" --density "$density" --seed "$seed"
      done
    done
    # What a method's parts are worth.
    for seed in 0 1 2; do
      one "64-iwp-waiting-$seed" iwp "${ours[@]}" --no-block-means --density 1/29.3 --seed "$seed"
    done
    one 16-iwp-waiting iwp "${ours[@]}" --no-block-means --density 1/5.58
    one 64-slimdp-no-explorer slimdp "${ours[@]}" --density 1/18.2 --core 1
    one 64-slimdp-no-core slimdp "${ours[@]}" --density 1/18.2 --core 0
    one mp2-half mp2 "${ours[@]}" --density 1/2
    one mp2-9 mp2 "${ours[@]}"
    one mp2-9-prediction mp2 "${ours[@]}" --prediction
    ;;
  cifar10-vgg11)
    ranks=2
    common=("${resnet20[@]}" --model vgg11 --epochs 2 --batch-size 64 --lr 0.1)
    one none none
    one mp2 mp2 "${ours[@]}" --density 1/3.44
    one mp2-half mp2 "${ours[@]}" --density 1/2
    ;;
  digits-mp2)
    for seed in 0 1 2; do
      common=(--data digits --model cnn --epochs 10 --batch-size 16 --lr 0.1 --seed "$seed")
      one "none-$seed" none
      one "mp2-$seed" mp2 "${ours[@]}"
      one "mp2-prediction-$seed" mp2 "${ours[@]}" --prediction
      one "topk-$seed" topk "${ours[@]}"
      one "dgc-$seed" dgc "${ours[@]}" --density 1/256
    done
    ;;
  gpt-adamw)
    half="--dense-values fp16" diloco="--local-steps 50 --outer-lr 0.7 --outer-momentum 0.9"
    gpt none 3e-3,6e-3,1e-2,1.4e-2 "" "" --seeds 0,1,2
    gpt demo 3e-3,4e-3,6e-3 1/45,1/150 "$half" --seeds 0,1,2
    gpt demo@orthogonal 6e-3,8e-3,1.2e-2 1/45 "$half --orthogonal --decay 0.9" --seeds 0,1,2
    gpt demo@orthogonal 6e-3,8e-3,1.2e-2 1/150 "$half --orthogonal" --seeds 0,1,2
    gpt demo@slow 6e-3,8e-3,1.2e-2 1/45 "$half --orthogonal" --seeds 0,1,2
    gpt demo@gather 3e-3,4e-3,6e-3 1/45 "$half --exchange gather" --seeds 0,1,2
    for method in iwp fft topk; do gpt "$method" 1.5e-3,3e-3,6e-3 1/8,1/16,1/64 "$half"; done
    gpt dgc 1.5e-3,3e-3,6e-3 1/8,1/16,1/64 "$half --no-momentum-correction"
    gpt iwp@local 3e-3,6e-3,1e-2 1/45 "$half --local-steps 5"
    gpt iwp@sparseloco 3e-3,6e-3,1e-2 1/45 "$half --local-steps 10 --unsent buffer --buffer-decay 0.95"
    # Without a density: 1/4, 1/8, 1/66, 1/50 and 1/50 of the bytes.
    gpt qsgd 3e-3,6e-3,1e-2 "" "$half --bits 4"
    gpt terngrad 3e-3,6e-3,1e-2 "" "$half"
    gpt quantized@4bits 1.5e-3,3e-3,6e-3,1e-2 "" "$half --bits 4"
    gpt quantized@8bits 3e-3,6e-3,1e-2 "" "$half --bits 8"
    gpt powersgd@2 1.5e-3,3e-3,6e-3,1e-2 "" "$half --rank 2"
    gpt fp16@local-25 3e-3,6e-3,1e-2 "" "--local-steps 25"
    gpt none@diloco-50 1.5e-3,3e-3,6e-3,1e-2 "" "$diloco"
    report "$out"
    ;;
  gpt-muon)
    optimizer=muon gpt none@muon 2e-3,3e-3,4.5e-3 "" "" --seeds 0,1,2
    local_muon 45 3 2 4.5e-3,6e-3 --seeds 0,1,2
    local_muon 45 3 2 9e-3
    local_muon 43 2 "1 --mean-bits 2" 4.5e-3 --seeds 0,1,2
    local_muon 43 2 "1 --mean-bits 2" 6e-3
    local_muon 170 8 "1 --mean-bits 2" 4.5e-3 --seeds 0,1,2
    local_muon 170 8 "1 --mean-bits 2" 3e-3,6e-3
    local_muon 500 16 1 3e-3,4.5e-3
    local_muon 500-decay 16 "1 --buffer-decay 0.9" 3e-3 --seeds 0,1,2
    late=(--bucket-mb 0.3 --fragments 4 --delay)
    local_muon late-170 8 "1 --mean-bits 2 ${late[*]} 2" 3e-3 --seeds 0,1,2
    local_muon late-170 8 "1 --mean-bits 2 ${late[*]} 2" 2e-3,4.5e-3
    local_muon fragments-170 8 "1 --mean-bits 2 --bucket-mb 0.3 --fragments 4" 3e-3
    local_muon fragments-500 16 "1 --buffer-decay 0.9 --bucket-mb 0.3 --fragments 4" 3e-3
    local_muon late-500 16 "1 --buffer-decay 0.9 ${late[*]} 4" 3e-3
    optimizer=muon gpt quantized@fragments-delay 3e-3,4.5e-3 "" "$(few_bits 3 2 --bucket-mb 0.3 --fragments 3 --delay 1)"
    optimizer=muon gpt quantized@delay-2 4.5e-3,6e-3 "" "$(few_bits 3 2 --delay 2)"
    optimizer=muon gpt quantized@delay 4.5e-3 "" "$(few_bits 3 2 --bucket-mb 0.3 --delay 1)"
    optimizer=muon gpt quantized@fragments 4.5e-3 "" "$(few_bits 3 2 --bucket-mb 0.3 --fragments 3)"
    optimizer=muon gpt topk@sparseloco 2e-3,3e-3,6e-3 1/45 "--dense-values fp16 --local-steps 10 --unsent buffer --buffer-decay 0.95"
    optimizer=muon gpt none@muloco-45 1.5e-3,3e-3,6e-3 "" "--local-steps 45 --outer-lr 0.7 --outer-momentum 0.6"
    gpt quantized@adamw-45 1.5e-3,3e-3,6e-3 "" "$(few_bits 3 2)"
    report "$out"
    ;;
  gpt-recipe)
    optimizer=muon-adamw every=1
    ranks=1 batch=32 gpt none@muon-adamw 3e-3,6e-3,1.2e-2,2.4e-2,4.8e-2 "" "" --seeds 0,1,2
    gpt quantized@recipe 6e-3,1.2e-2,2.4e-2 "" "$(few_bits 3 2 --restore-length)" --seeds 0,1,2
    gpt quantized@averaged 1.2e-2,2.4e-2 "" "$(few_bits 3 2 --restore-length --averaged-gradients)" --seeds 0,1,2
    report "$out"
    ;;
  gpt-muon-ranks)
    ranks=16 batch=2
    optimizer=muon gpt none@muon 3e-3 "" ""
    local_muon 45 3 2 3e-3,4.5e-3,6e-3,9e-3 --seeds 0,1,2
    local_muon 170 8 "1 --mean-bits 2" 6e-3
    optimizer=muon gpt quantized@averaged 6e-3 "" "$(few_bits 3 2 --averaged-gradients)"
    report "$out"
    ranks=32 batch=1 folder=$out/32
    local_muon 45 3 2 6e-3
    report "$folder"
    ;;
  gpt-sizes)
    # As many bytes a parameter as the GPT of gpt-muon.
    model=gpt-70k folder=$out/$model
    dense_and_local_muon 2 2e-3,3e-3,4.5e-3,6e-3 3e-3,4.5e-3,6e-3
    model=gpt-1m folder=$out/$model
    dense_and_local_muon 32 3e-3 3e-3,4.5e-3
    ;;
  gpt-long)
    epochs=100 folder=$out
    dense_and_local_muon 8 3e-3 4.5e-3
    ;;
  gpt-nodes)
    ranks=16 batch=2 optimizer=plain half="--dense-values fp16 --nodes 4"
    gpt demo@nodes 3e-3 "" "$half --density 0.08456" --seeds 0,1,2
    gpt demo@nodes-gather 3e-3 "" "$half --exchange gather --density 0.01887" --seeds 0,1,2
    gpt demo@nodes-orthogonal 6e-3 "" "$half --orthogonal --decay 0.9 --subtract 1 --density 0.08456" --seeds 0,1,2
    report "$out"
    ;;
  gpt-tune)
    pretrained=results/gpt-tune.pt
    [[ -f $pretrained ]] || "$python" scripts/experiments/train.py --host threads --ranks 1 --data text --model gpt --epochs 12 \
      --optimizer adamw --lr 6e-3 --batch-size 32 --eval-every 6 --save "$pretrained"
    tune() {
      simulate "$@" --seeds 0,1,2 --data text-tags --model gpt-tagger --epochs 3 \
        -- --from "$pretrained" --optimizer adamw --batch-size 8 --eval-every 3
    }
    tune none 3e-4,1e-3,3e-3,6e-3 "" ""
    tune quantized@local 3e-4,1e-3,3e-3,6e-3 "" "$(few_bits 3 2)"
    tune quantized@4bits 1e-3,3e-3,6e-3 "" "--bits 4 --dense-values fp16"
    tune demo@orthogonal 3e-4,1e-3,3e-3 "" "--density 0.08456 --dense-values fp16 --orthogonal --decay 0.95 --subtract 0.2"
    report "$out"
    ;;
  nanogpt)
    "$python" scripts/experiments/nanogpt.py --train "$data" --results "$out/runs.jsonl"
    "$python" scripts/experiments/nanogpt.py --results "$out/runs.jsonl"
    ;;
  gpt-ranks)
    for ranks in 8 16; do
      folder=$out/$ranks batch=$((32 / ranks))
      gpt none 6e-3 "" ""
      gpt demo 3e-3 1/45 "--dense-values fp16"
      gpt demo@gather 3e-3 1/45 "--dense-values fp16 --exchange gather"
      report "$folder"
    done
    ;;
  vit)
    training=(--data cifar10 --model vit --epochs 3 -- --optimizer adamw "${images[@]}")
    simulate none 5e-4,1e-3,3e-3,6e-3 "" "" "${training[@]}"
    simulate demo 1e-3,2e-3,4e-3 1/32 "--dense-values fp16" "${training[@]}"
    report "$out"
    ;;
  vit-muon)
    training=(--data cifar10 --model vit --epochs 3 -- --optimizer muon "${images[@]}")
    simulate none@muon 5e-4,1e-3,2e-3 "" "" --seeds 0,1 "${training[@]}"
    simulate quantized@45 1e-3,2e-3,3e-3 "" "$(few_bits 3 2)" --seeds 0,1 "${training[@]}"
    simulate quantized@averaged 1e-3,2e-3,3e-3 "" "$(few_bits 3 2 --averaged-gradients)" "${training[@]}"
    simulate quantized@restored 2e-3 "" "$(few_bits 3 2 --restore-length)" "${training[@]}"
    simulate quantized@averaged-restored 1e-3 "" "$(few_bits 3 2 --averaged-gradients --restore-length)" "${training[@]}"
    report "$out"
    folder=$out/10 training=(--data cifar10 --model vit --epochs 10 -- --optimizer muon "${images[@]}")
    simulate none@muon 1e-3 "" "" "${training[@]}"
    simulate quantized@45 2e-3 "" "$(few_bits 3 2)" "${training[@]}"
    report "$folder"
    ;;
  cifar10-muon)
    training=(--data cifar10 --model resnet20 --epochs 10 -- "${images[@]}" --channels-last --optimizer muon)
    simulate none@muon 6e-3 "" "" "${training[@]}"
    simulate quantized@64 6e-3 "" "$(few_bits 4 2)" "${training[@]}"
    report "$out"
    ;;
  cifar10-signs)
    signs="--dense-values fp16 --weight-decay 0.1"
    for epochs in 4 10; do
      folder=$out/$epochs training=(--data cifar10 --model resnet20 --epochs "$epochs")
      if ((epochs == 4)); then rates=5e-3,1e-2,2e-2 seeds=0; else rates=5e-3,7e-3,1e-2 seeds=0,1,2; fi
      settings=(--seeds "$seeds" -- "${images[@]}" --channels-last)
      simulate demo "$rates" 1/64 "$signs" "${training[@]}" "${settings[@]}"
      if ((epochs == 4)); then
        simulate demo@orthogonal 3e-3,6e-3,1e-2 1/64 "$signs --orthogonal" "${training[@]}" "${settings[@]}"
        report "$folder"; continue
      fi
      simulate demo@orthogonal 6e-3 1/64 "$signs --orthogonal" "${training[@]}" "${settings[@]}"
      simulate none 0.3 "" "" "${training[@]}" "${settings[@]}"
      report "$folder"
    done
    ;;
  exchange-ring)
    export "${sleep[@]}"
    for method in none fp16; do having "$method" "${ring[@]}"; done
    steps_by_rate --methods none,fp16,iwp,demo
    ;;
  exchange-methods)
    export "${sleep[@]}"
    exchange --rate 1gbit --json "$out/runs.jsonl/mpi"
    ;;
  exchange-buckets)
    export "${sleep[@]}"
    options=()
    for size in 8 16 32 64; do options+=(--option "iwp@$size:--bucket-mb $size"); done
    exchange --rate none,1gbit,100mbit --runs 2 --methods iwp@8,iwp@16,iwp@32,iwp@64 "${options[@]}" --json "$out/runs.jsonl/mpi"
    ;;
  exchange-nodes)
    export "${sleep[@]}"
    for host in "" ddp-; do
      gather=${host}demo@gather gather_nodes=${host}demo@gather-nodes selected="--exchange gather --density 1/64"
      methods=${host}none,${host}fp16,$gather,$gather_nodes
      options=(--option "$gather:$selected" --option "$gather_nodes:$selected --nodes 2")
      for method in iwp demo topk "${host:+hvd-}powersgd"; do
        methods+=,$host$method,$host$method@nodes options+=(--option "$host$method@nodes:--nodes 2")
      done
      for rate in 1gbit 100mbit; do
        "$python" scripts/lab/bench_exchange.py --shapes resnet50 --hosts 2 --ranks-per-node 2 --rate "$rate" --steps 3 --max-seconds 60 \
          --methods "$methods" "${options[@]}" --json "$out/runs.jsonl/${host:-mpi-}$rate"
      done
    done
    ;;
  exchange-hsdp)
    "$python" scripts/lab/bench_hsdp.py --rate none,1gbit,100mbit --json "$out/runs.jsonl/transformer"
    ;;
  exchange-pause)
    export "${sleep[@]}"
    few=$(few_bits 3 2)
    having fp16 "${ring[@]}"
    late="$few --fragments 3 --delay 1 --bucket-mb 8"
    methods=fp16,ddp-quantized@few,ddp-quantized@delay,ddp-quantized@late
    options=(--option "ddp-quantized@few:$few" --option "ddp-quantized@delay:$few --delay 2" --option "ddp-quantized@late:$late")
    for measured in "100 10gbit,1gbit" "350 100mbit"; do
      read -r pause rates <<<"$measured"
      exchange --pause-ms "$pause" --rate "$rates" --steps 4 --max-seconds 60 --methods "$methods" "${options[@]}" \
        --json "$out/runs.jsonl/pause-$pause"
    done
    ;;
  exchange-bits)
    export "${sleep[@]}"
    exchange --rate 10gbit,1gbit --max-seconds 60 --json "$out/runs.jsonl/resnet50" --methods ddp-fp16,ddp-quantized@8bits,ddp-quantized@4bits \
      --option "ddp-quantized@8bits:--bits 8 --dense-values fp16" --option "ddp-quantized@4bits:--bits 4 --dense-values fp16"
    ;;
  exchange-share)
    export "${sleep[@]}"
    methods=() options=()
    row() { methods+=("$1"); [[ ! ${2:-} ]] || options+=(--option "$1:$2"); }
    outer() { echo "--local-steps $1 --outer-lr 0.7 --outer-momentum 0.9"; }
    row ddp-quantized@47 "$(few_bits 3 2)"
    row ddp-quantized@151 "$(few_bits 5 1)"
    row ddp-quantized@171 "$(few_bits 8 1 --mean-bits 2)"
    row ddp-quantized@483 "$(few_bits 16 1)"
    row ddp-quantized@483-late "$(few_bits 16 1 --bucket-mb 8 --fragments 4 --delay 4)"
    share() {  # RATE [DELAY, in ms]
      exchange --shapes gpt30m --pause-ms 290 --rate "$1" --delay-ms "${2:-0}" --steps 3 --max-seconds 60 \
        --methods "$(IFS=,; echo "${methods[*]}")" "${options[@]}" --json "$out/runs.jsonl/$1${2:+-$2ms}"
    }
    share 5mbit
    for delay in "" 50 250; do share 20mbit $delay; done
    row ddp-fp16
    row ddp-none@diloco-32 "$(outer 32)"
    for delay in 50 250; do share 100mbit $delay; done
    row ddp-none
    for period in 1 8 128; do row "ddp-none@diloco-$period" "$(outer "$period")"; done
    share 100mbit
    share 500mbit
    ;;
  growth)
    "$python" scripts/lab/bench_growth.py --millions 1,10,100 --ranks 4 --json "$out/runs.jsonl/entries"
    ;;
  memory)
    "$python" scripts/lab/bench_memory.py --out "$out"
    ;;
  race-*)
    # IWP also with four or five times as many bytes. Settings are those that short trials found fastest; for vgg11 the ring,
    # which exchange-ring found fastest for Horovod on such links, and threads that sleep.
    methods=none,fp16,iwp,iwp@16 options=(--option "iwp:${ours[*]}" --option "iwp@16:--density 1/5.65 ${ours[*]}")
    for method in none fp16; do having "$method" "${sleep[@]}"; done
    training=(--model resnet20 --epochs 4 --lr 0.3)
    if [[ $experiment == race-vgg11 ]]; then
      methods+=,fft options+=(--option "fft:${ours[*]}") training=(--model vgg11 --epochs 2 --batch-size 128 --lr 0.02)
      for method in iwp iwp@16 fft; do having "$method" "${sleep[@]}"; done
      for method in none fp16; do having "$method" "${ring[@]}"; done
    fi
    "$python" scripts/experiments/race.py --hosts 4 --rates 100mbit,1gbit --methods "$methods" "${options[@]}" "${environments[@]}" \
      --target "${target[$experiment]}" --out "$out" -- "${resnet20[@]}" "${training[@]}" --eval-every 0.25
    ;;
  gradients)
    bash scripts/run.sh 4 scripts/experiments/gradient_errors.py record --data digits --model cnn --epochs 12 --batch-size 16 --lr 0.1 \
      --out "$out/digits"
    bash scripts/run.sh 4 scripts/experiments/gradient_errors.py record "${resnet20[@]}" --epochs 3 --lr 0.3 --out "$out/cifar10"
    "$python" scripts/experiments/gradient_errors.py errors "$out"/{cifar10,digits}
    "$python" scripts/experiments/gradient_errors.py record --host threads --data text --model gpt --optimizer muon --lr 3e-3 \
      --epochs 15 --batch-size 8 --local-steps 8 --max-steps 480 --moments 0.4 --count 20 --out "$out/muon"
    "$python" scripts/experiments/gradient_errors.py feedback "$out/muon"
    for bits in 1 2; do
      "$python" scripts/experiments/gradient_errors.py feedback "$out/muon" --bits $bits --mean-bits $((bits + 1)) --runs 512
    done
    "$python" scripts/experiments/gradient_errors.py feedback "$out/muon" --transform --runs 512
    ;;
esac
# Trainings by `one` end with their table.
[[ -z ${common[*]} ]] || "$python" scripts/experiments/table.py "$out/runs.jsonl"
