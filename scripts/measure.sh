#!/usr/bin/env bash
# The measurements of docs/results.md and docs/speed.md: mostly trainings of 4 ranks under mpirun, one JSON file a run, then a table and a plot.
# A run whose file is there is not repeated.
#   usage: measure.sh digits [OUT]
#          measure.sh cifar10 DATA_DIR [OUT]           DATA_DIR holds cifar-10-batches-py/
#          measure.sh cifar10-short DATA_DIR [OUT]
#          measure.sh cifar10-budgets DATA_DIR [OUT]   every method at 1/64 and 1/16 of the dense bytes
#          measure.sh cifar10-times DATA_DIR [OUT]     the same methods for 60 steps each, for their step times
#          measure.sh cifar10-vgg11 DATA_DIR [OUT]     MP2 and dense, 2 ranks
#          measure.sh digits-mp2 [OUT]                 MP2, its prediction, and its rivals
#          measure.sh digits-slimdp [OUT]              core, explorer and both, at equal bytes
#          measure.sh exchange [OUT]                   steps of ResNet-50's shapes on four hosts, by the rate of their links (root)
#          measure.sh exchange-ring [OUT]              Horovod's own by the ring of Open MPI, and IWP (root)
#          measure.sh exchange-methods [OUT]           every method at 1 Gbit/s (root)
#          measure.sh exchange-settings [OUT]          dense and IWP with other settings of Horovod and Open MPI (root)
#          measure.sh exchange-buckets [OUT]           IWP with other sizes of buckets (root)
#          measure.sh growth [OUT]                     cost and memory as network and ranks grow
#          measure.sh race-resnet20 DATA_DIR [OUT]     time to an accuracy on four hosts with slow links (root)
#          measure.sh race-vgg11 DATA_DIR [OUT]        likewise
#          measure.sh races [RESNET20 VGG11 [OUT]]     both in one table and one plot
#          measure.sh timeline DATA_DIR [OUT]          what hides behind backward, on two hosts (root)
#          measure.sh gradients DATA_DIR [OUT]         errors against bits, on gradients recorded from both
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh

# What compressed runs have in common where bytes are compared.
ours=(--momentum-correction --dense-values fp16)

# IWP without its blocks' means, which then wait with their entries: as it was when these were measured, or to compare.
waiting=(--no-block-means)

usage() { sed -n '2,22s/^# \?//p' "$0" >&2; exit 2; }

one() {  # NAME ARGUMENTS...
  local file=$out/$1.json; shift
  [[ -f $file ]] || bash scripts/run.sh "${ranks:-4}" scripts/train.py --json "$file" "$@"
}

# Threads of MPI that wait sleep, instead of giving way in a loop: with more threads than cores, who gains by it depends on method and network.
sleep=(OMPI_MCA_threads_pthreads_yield_strategy=nanosleep OMPI_MCA_threads_pthreads_nanosleep_time=100000)
# Open MPI takes no notice of the algorithm without the first.
ring=(OMPI_MCA_coll_tuned_use_dynamic_rules=1 OMPI_MCA_coll_tuned_allreduce_algorithm=4)

# Accuracies that dense reaches in the few epochs of a race.
resnet20_target=0.7 vgg11_target=0.6

# Options of bench_exchange.py and race.py: settings for the ranks of one method.
environments=()
having() {  # LABEL NAME=VALUE...
  local label=$1 setting; shift
  for setting in "$@"; do environments+=(--environment "$label:$setting"); done
}

steps_by_rate() {  # OUT ARGUMENTS...: one run where a dense step takes 20 s
  local out=$1 rates rate runs; shift
  for rates in "none,10gbit,1gbit 3" "100mbit 1"; do
    read -r rate runs <<<"$rates"
    .venv/bin/python scripts/bench_exchange.py --shapes resnet50 --hosts 4 --rate "$rate" --runs "$runs" --max-seconds 60 \
      --json "$out/resnet50-${rate//,/-}.json" --plot "$out/${rate//,/-}" "$@" "${environments[@]}"
  done
}

at_equal_bytes() {  # COMMON ARGUMENTS...: densities such that all bytes together, tensors that travel dense included, are a share of dense
  local share density method
  one none "$@" --compression none
  one fp16 "$@" --compression fp16
  for share in "64 1/31.9 1/67.9 1/29.3 1/18.2 1/362.7" "16 1/5.65 1/11.07 1/5.58 1/3.44 1/68.57"; do
    read -ra density <<<"$share"
    share=${density[0]}
    one "$share-iwp-lanes4" "$@" --compression iwp "${ours[@]}" --density "${density[1]}"
    one "$share-iwp-fp16" "$@" --compression iwp "${ours[@]}" --density "${density[2]}" --values fp16
    one "$share-fft" "$@" --compression fft "${ours[@]}" --density "${density[3]}"
    # Without indices.
    for method in mipd slimdp mp2; do
      one "$share-$method" "$@" --compression "$method" "${ours[@]}" --density "${density[4]}"
    done
    for method in topk dgc; do
      one "$share-$method" "$@" --compression "$method" "${ours[@]}" --density "${density[5]}"
    done
  done
  # What has a ratio of its own.
  one qsgd-4 "$@" --compression qsgd "${ours[@]}" --bits 4
  one terngrad "$@" --compression terngrad "${ours[@]}"
}

case ${1:-} in
  digits)
    out=${2:-docs/results/digits}
    mkdir -p "$out"
    for seed in 0 1 2; do
      common=(--data digits --model cnn --epochs 12 --batch-size 16 --lr 0.1 --seed "$seed")
      one "none-$seed" "${common[@]}" --compression none
      one "fp16-$seed" "${common[@]}" --compression fp16
      one "iwp-64-$seed" "${common[@]}" --compression iwp --density 1/64 --values fp16
      one "iwp-32-lanes4-$seed" "${common[@]}" --compression iwp
      one "fft-32-lanes4-$seed" "${common[@]}" --compression fft
      one "mipd-16-lanes4-$seed" "${common[@]}" --compression mipd --density 1/16
    done
    .venv/bin/python scripts/table.py "$out"/*.json
    ;;
  cifar10)
    data=${2:?DATA_DIR} out=${3:-docs/results/cifar10}
    mkdir -p "$out"
    common=(--data cifar10 --data-dir "$data" --model resnet20 --epochs 10 --lr 0.3 --channels-last --amp bf16)
    one none "${common[@]}" --compression none
    for share in 64 32 16; do
      one "iwp-$share" "${common[@]}" --compression iwp --density "1/$share" --values fp16 --momentum-correction "${waiting[@]}"
    done
    one "iwp-64-plain" "${common[@]}" --compression iwp --density 1/64 --values fp16 "${waiting[@]}"
    one mp2-9 "${common[@]}" --compression mp2 "${ours[@]}"
    one fp16 "${common[@]}" --compression fp16
    .venv/bin/python scripts/table.py "$out"/{none,fp16,iwp-16,iwp-32,iwp-64,iwp-64-plain,mp2-9}.json --plot "$out/accuracy.png"
    ;;
  cifar10-short)
    # How learning rate and momentum fit together at 1/64, in runs of 4 epochs.
    data=${2:?DATA_DIR} out=${3:-docs/results/cifar10-short}
    mkdir -p "$out"
    common=(--data cifar10 --data-dir "$data" --model resnet20 --epochs 4 --channels-last --amp bf16)
    iwp=(--compression iwp --density 1/64 --values fp16 "${waiting[@]}")
    for lr in 0.1 0.3; do
      one "none-$lr" "${common[@]}" --lr "$lr" --compression none
      one "iwp-64-plain-$lr" "${common[@]}" --lr "$lr" "${iwp[@]}"
    done
    one iwp-64-0.3 "${common[@]}" --lr 0.3 "${iwp[@]}" --momentum-correction
    one iwp-64-0.3-one-leader "${common[@]}" --lr 0.3 "${iwp[@]}" --momentum-correction --leaders 1
    one iwp-64-0.3-no-random "${common[@]}" --lr 0.3 "${iwp[@]}" --momentum-correction --explore 0
    .venv/bin/python scripts/table.py "$out"/*.json
    ;;
  cifar10-budgets)
    data=${2:?DATA_DIR} out=${3:-docs/results/cifar10-budgets}
    mkdir -p "$out"
    common=(--data cifar10 --data-dir "$data" --model resnet20 --epochs 4 --lr 0.3 --channels-last --amp bf16)
    at_equal_bytes "${common[@]}"
    # More seeds of dense and of the best.
    for seed in 1 2; do
      one "none-$seed" "${common[@]}" --compression none --seed "$seed"
      for pair in "iwp-lanes4 iwp 1/31.9" "fft fft 1/29.3" "topk topk 1/362.7" "dgc dgc 1/362.7"; do
        read -r name method density <<<"$pair"
        one "64-$name-$seed" "${common[@]}" --compression "$method" "${ours[@]}" --density "$density" --seed "$seed"
      done
    done
    # What a method's parts are worth.
    for seed in 0 1 2; do
      one "64-iwp-waiting-$seed" "${common[@]}" --compression iwp "${ours[@]}" "${waiting[@]}" --density 1/29.3 --seed "$seed"
    done
    one 16-iwp-waiting "${common[@]}" --compression iwp "${ours[@]}" "${waiting[@]}" --density 1/5.58
    one 64-mipd-whole "${common[@]}" --compression mipd "${ours[@]}" --density 1/18.2 --no-layerwise
    one 64-slimdp-no-explorer "${common[@]}" --compression slimdp "${ours[@]}" --density 1/18.2 --core 1
    one 64-slimdp-no-core "${common[@]}" --compression slimdp "${ours[@]}" --density 1/18.2 --core 0
    one mp2-half "${common[@]}" --compression mp2 "${ours[@]}" --density 1/2
    one mp2-9 "${common[@]}" --compression mp2 "${ours[@]}"
    one mp2-9-prediction "${common[@]}" --compression mp2 "${ours[@]}" --prediction
    one mp2-9-rotation "${common[@]}" --compression mp2 "${ours[@]}" --choice rotation
    .venv/bin/python scripts/table.py "$out"/{none*,fp16,qsgd-4,terngrad,mp2-*,64-*,16-*}.json --plot "$out/accuracy.png"
    ;;
  cifar10-times)
    data=${2:?DATA_DIR} out=${3:-docs/results/cifar10-times}
    mkdir -p "$out"
    at_equal_bytes --data cifar10 --data-dir "$data" --model resnet20 --epochs 4 --lr 0.3 --channels-last --amp bf16 \
      --max-steps 60 --eval-every 1000000
    .venv/bin/python scripts/table.py "$out"/{none,fp16,qsgd-4,terngrad,64-*,16-*}.json
    ;;
  cifar10-vgg11)
    data=${2:?DATA_DIR} out=${3:-docs/results/cifar10-vgg11} ranks=2
    mkdir -p "$out"
    common=(--data cifar10 --data-dir "$data" --model vgg11 --epochs 2 --batch-size 64 --lr 0.1 --channels-last --amp bf16)
    one none "${common[@]}" --compression none
    one mp2 "${common[@]}" --compression mp2 "${ours[@]}" --density 1/3.44
    one mp2-half "${common[@]}" --compression mp2 "${ours[@]}" --density 1/2
    .venv/bin/python scripts/table.py "$out"/*.json
    ;;
  digits-mp2)
    out=${2:-docs/results/digits-mp2}
    mkdir -p "$out"
    for seed in 0 1 2; do
      common=(--data digits --model cnn --epochs 10 --batch-size 16 --lr 0.1 --seed "$seed")
      one "none-$seed" "${common[@]}" --compression none
      one "wnn-$seed" "${common[@]}" --compression none --extrapolate wnn
      one "line-$seed" "${common[@]}" --compression none --extrapolate line
      one "mp2-$seed" "${common[@]}" --compression mp2 "${ours[@]}"
      one "mp2-prediction-$seed" "${common[@]}" --compression mp2 "${ours[@]}" --prediction
      one "topk-$seed" "${common[@]}" --compression topk "${ours[@]}"
      one "dgc-$seed" "${common[@]}" --compression dgc "${ours[@]}" --density 1/256
    done
    .venv/bin/python scripts/table.py "$out"/*.json
    ;;
  digits-slimdp)
    out=${2:-docs/results/digits-slimdp}
    .venv/bin/python scripts/compare.py --out "$out" --data digits --model cnn --ranks 4 --epochs 4 --seeds 0,1,2 \
      --methods slimdp@mix,slimdp@tenth,slimdp@quarter,slimdp@explorer,slimdp@core --option 'slimdp@tenth:--core 0.1' \
      --option 'slimdp@quarter:--core 0.25' --option 'slimdp@explorer:--core 0' --option 'slimdp@core:--core 1' \
      --budgets 1/64,1/128 --momentum-correction -- --batch-size 16 --lr 0.1
    # Three times as long, at the density of 1/128, and with a core that is selected more often.
    for seed in 0 1 2 3 4; do
      for pair in "0 20" "0.25 5" "0.25 2" "0.5 20" "0.5 5" "0.5 2"; do
        read -r core steps <<<"$pair"
        one "long-core-$core-$steps-$seed" --data digits --model cnn --epochs 12 --batch-size 16 --lr 0.1 --seed "$seed" \
          --compression slimdp --core "$core" --reselect "$steps" --density 0.02629 "${ours[@]}"
      done
    done
    .venv/bin/python scripts/table.py "$out"/long-*.json
    ;;
  exchange)
    methods=()
    for method in none fp16 iwp; do
      methods+=("$method" "$method@sleep")
      having "$method@sleep" "${sleep[@]}"
    done
    steps_by_rate "${2:-docs/results/exchange}" --methods "$(IFS=,; echo "${methods[*]}"),ddp-fp16" --backend mpi,gloo
    ;;
  exchange-ring)
    having iwp@sleep "${sleep[@]}"
    having none@ring "${ring[@]}"
    having fp16@ring "${ring[@]}"
    steps_by_rate "${2:-docs/results/exchange-ring}" --methods none,none@ring,fp16,fp16@ring,iwp,iwp@sleep
    ;;
  exchange-methods)
    out=${2:-docs/results/exchange-methods}
    export "${sleep[@]}"
    .venv/bin/python scripts/bench_exchange.py --shapes resnet50 --hosts 4 --rate 1gbit --json "$out/mpi.json" --plot "$out"
    ;;
  exchange-settings)
    out=${2:-docs/results/exchange-settings}
    export "${sleep[@]}"
    methods=()
    for method in none iwp; do
      methods+=("$method")
      for setting in yield:OMPI_MCA_threads_pthreads_yield_strategy=sched_yield spin:OMPI_MCA_mpi_yield_when_idle=0 \
        cycle-0.2:HOROVOD_CYCLE_TIME=0.2 cycle-5:HOROVOD_CYCLE_TIME=5 fusion-1MB:HOROVOD_FUSION_THRESHOLD=1048576 \
        no-cache:HOROVOD_CACHE_CAPACITY=0 ring:"${ring[1]}" \
        segmented-ring:OMPI_MCA_coll_tuned_allreduce_algorithm=5 rabenseifner:OMPI_MCA_coll_tuned_allreduce_algorithm=6; do
        label=$method@${setting%%:*}
        methods+=("$label")
        having "$label" "${setting#*:}"
        [[ $setting != *coll_tuned* ]] || having "$label" "${ring[0]}"
      done
    done
    .venv/bin/python scripts/bench_exchange.py --shapes resnet50 --hosts 4 --rate 1gbit --runs 2 --steps 5 \
      --methods "$(IFS=,; echo "${methods[*]}")" "${environments[@]}" --json "$out/mpi.json" --plot "$out"
    ;;
  exchange-buckets)
    out=${2:-docs/results/exchange-buckets}
    export "${sleep[@]}"
    methods=() options=()
    for size in 8 16 32 64; do
      methods+=("iwp@$size") options+=(--option "iwp@$size:--bucket-mb $size")
    done
    .venv/bin/python scripts/bench_exchange.py --shapes resnet50 --hosts 4 --rate none,1gbit,100mbit --runs 2 \
      --methods "$(IFS=,; echo "${methods[*]}")" "${options[@]}" --json "$out/mpi.json" --plot "$out"
    ;;
  growth)
    out=${2:-docs/results/growth}
    .venv/bin/python scripts/bench_growth.py --millions 1,10,100 --ranks 4 --json "$out/entries.json"
    .venv/bin/python scripts/bench_growth.py --methods iwp --millions 1,5,25,50,100,200 --ranks 4 --json "$out/iwp.json"
    .venv/bin/python scripts/bench_growth.py --millions 25 --ranks 2,4,8 --json "$out/ranks.json"
    ;;
  race-*)
    data=${2:?DATA_DIR} out=${3:-docs/results/$1}
    # IWP with four or five times as many bytes, too.
    methods=none,fp16,iwp,iwp@16 options=(--option "iwp:${ours[*]}" --option "iwp@16:--density 1/5.65 ${ours[*]}")
    case $1 in
      race-resnet20)
        # Settings as short trials found fastest.
        target=$resnet20_target training=(--model resnet20 --epochs 4 --lr 0.3)
        for method in none fp16; do having "$method" "${sleep[@]}"; done
        ;;
      race-vgg11)
        # The ring, by which exchange-ring found Horovod's own fastest on such links; many threads for few cores, so all sleep.
        methods+=,fft options+=(--option "fft:${ours[*]}")
        target=$vgg11_target training=(--model vgg11 --epochs 2 --batch-size 128 --lr 0.02)
        for method in none fp16 iwp iwp@16 fft; do having "$method" "${sleep[@]}"; done
        for method in none fp16; do having "$method" "${ring[@]}"; done
        ;;
      *) usage ;;
    esac
    .venv/bin/python scripts/race.py --hosts 4 --rates 100mbit,1gbit --methods "$methods" "${options[@]}" "${environments[@]}" \
      --target "$target" --out "$out" -- --data cifar10 --data-dir "$data" "${training[@]}" --eval-every 0.25 --channels-last --amp bf16
    ;;
  races)
    .venv/bin/python scripts/race.py --report "${2:-docs/results/race-resnet20}:$resnet20_target" "${3:-docs/results/race-vgg11}:$vgg11_target" \
      --plot "${4:-docs/results}/races.png"
    ;;
  timeline)
    # Two hosts for two cores: with more, a rank waits for the others' turns, which no network does.
    data=${2:?DATA_DIR} out=${3:-docs/results}
    export "${sleep[@]}"
    trace=$(mktemp)
    trap 'bash scripts/netlab.sh --lab tl down; rm -f "$trace"' EXIT
    bash scripts/netlab.sh --lab tl up 2 1gbit
    bash scripts/netlab.sh --lab tl run 2 scripts/train.py --data cifar10 --data-dir "$data" --model vgg11 --batch-size 64 --epochs 2 --lr 0.1 \
      --channels-last --amp bf16 --compression iwp "${ours[@]}" --bucket-mb 4 --max-steps 30 --eval-every 1000 --limit-train 5120 \
      --trace "$trace"
    .venv/bin/python scripts/timeline.py "$trace" --plot "$out/timeline.png"
    ;;
  gradients)
    data=${2:?DATA_DIR} out=${3:-results/gradients}
    bash scripts/run.sh 4 scripts/record_gradients.py --data digits --model cnn --epochs 12 --batch-size 16 --lr 0.1 \
      --out "$out/digits"
    bash scripts/run.sh 4 scripts/record_gradients.py --data cifar10 --data-dir "$data" --model resnet20 --epochs 3 \
      --lr 0.3 --channels-last --amp bf16 --out "$out/cifar10"
    .venv/bin/python scripts/gradient_errors.py "$out"/{cifar10,digits}
    ;;
  *) usage ;;
esac
