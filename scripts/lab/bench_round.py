#!/usr/bin/env python3
"""What one exchange of local steps costs a rank: bytes through memory, time on one core, and memory.

    bench_round.py --millions 25 --ranks 2,4 --json FILE.jsonl/NAME
    bench_round.py --recipes "low_bit, length kept" --operators

One process and one thread stand for a rank; the other ranks are simulated as sending what it sends, whose time and
bytes are not counted, and there is no network. The network is layers of 1000 by 1000; weights move in every step.

"bytes an entry" are those of the tensors that the operators of one `local.step()` read and write, in the number of
entries: what would cross memory if no cache held anything.
"ms" is the time of `local.step()`, median. "held" and "peak" are bytes of memory an entry between exchanges and within
one, beside weights and gradients: as of bench_growth.py, whose process they need.
"""

import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))

import table
import torch
from bench_growth import LAYER, SLACK, costs, new_gradients, resident
from experiment import metrics
from experiment.comparison import texts
from experiment.files import script_parser
from experiment.result_file import run_path, write_run
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hvd_compress import recipes
from hvd_compress.carriers.mirror import Mirror

RECIPES = {
    "low_bit": recipes.low_bit,
    "low_bit, length kept": lambda *given, **options: recipes.low_bit(*given, restore_length=False, **options),
    "low_bit, delay 1": lambda *given, **options: recipes.low_bit(*given, delay=1, **options),
    "diloco": recipes.diloco,
    "sparseloco": recipes.sparseloco,
}


#: Arguments of the package's operators that they write without reading them.
OUTPUTS = {"codes", "quantization_error", "out", "squares"}


class Traffic(TorchDispatchMode):
    """A context that counts, by operator, the bytes of the tensors that operators read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result, schema = func(*args, **kwargs), func._schema
        name = schema.name.partition("::")[2]
        if func.is_view or "empty" in name or name in ("set_", "_unsafe_view"):  # moves nothing
            return result
        writes = False
        for place, argument in enumerate(schema.arguments):
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            fills = argument.is_out or (written and (name in ("copy_", "zero_", "fill_") or argument.name in OUTPUTS))
            fills |= name == "codebook_decode" and argument.name == "values" and not args[-1]
            fills |= name == "codebook_mean" and argument.name == "mean"
            fills |= name == "codebook_move" and argument.name == "own" and args[9] is None  # before
            writes |= written
            if name.startswith("new_") or name.endswith("_like"):  # only the form is read
                break
            moved = sum(leaf.nbytes for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
            self.bytes[name] += moved * (written + (not fills))
        if not writes:
            self.bytes[name] += sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result


class Uncounted(Mirror):
    """Other ranks, whose copies no :class:`Traffic` counts."""

    def start(self, request: Any, name: str) -> Any:
        with _disable_current_modes():
            return super().start(request, name)


class Rank:
    """A network, an optimizer that moves it by noise, and its local steps of period 1."""

    def __init__(self, recipe: str, millions: int, ranks: int) -> None:
        self.layers = torch.nn.ParameterList(torch.randn(LAYER) * 0.02 for _ in range(millions))
        self.noise, self.steps, self.mirror = torch.randn(LAYER[0] * LAYER[1] + SLACK) * 0.01, 0, Uncounted(ranks)
        for layer in self.layers:
            layer.grad = torch.ones_like(layer)
        self.before, self.entries = resident("VmRSS"), millions * LAYER[0] * LAYER[1]
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=1.0)
        period = 2 if "delay" in recipe else 1
        self.local = RECIPES[recipe](self.layers, self.optimizer, period, collectives=self.mirror)

    def move(self) -> None:
        """One step of the optimizer."""
        self.steps += 1
        new_gradients(self.layers, self.noise, self.steps)
        self.optimizer.step()

    def step(self) -> float:
        """The seconds of one exchange, without the mirror's."""
        seconds, ended = 0.0, False
        while not ended:
            self.move()
            begin, idle = time.perf_counter(), self.mirror.seconds
            ended = self.local.step()
            seconds += time.perf_counter() - begin - (self.mirror.seconds - idle)
        return seconds

    def traffic(self) -> dict[str, float]:
        """The bytes an entry of one exchange, by operator, the largest first."""
        with Traffic() as counted:
            ended = False
            while not ended:
                with _disable_current_modes():
                    self.move()
                ended = self.local.step()
        return {name: moved / self.entries for name, moved in counted.bytes.most_common()}


def measure(recipe: str, millions: int, ranks: int, steps: int) -> dict[str, Any]:
    """In a process of its own: memory that an earlier measurement has freed could be reused."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    Rank(recipe, 1, ranks).step()
    rank = Rank(recipe, millions, ranks)
    found = costs(rank, rank.entries, steps, before=2)
    traffic = rank.traffic()
    return {
        "recipe": recipe,
        "entries": rank.entries,
        "ranks": ranks,
        "bytes_per_entry": sum(traffic.values()),
        **found,
        "operators": {name: moved for name, moved in traffic.items() if moved > 0.05},
    }


def main() -> int:
    def counts(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = script_parser(__doc__)
    parser.add_argument("--recipes", type=texts, default=["low_bit"], help=f"some of: {'; '.join(RECIPES)}")
    parser.add_argument("--millions", type=counts, default=[25], help="of entries, as 1,25")
    parser.add_argument("--ranks", type=counts, default=[4], help="as 2,4,8")
    parser.add_argument("--steps", type=int, default=5, help="exchanges that are measured, after two others")
    parser.add_argument("--operators", action="store_true", help="print the bytes an entry of each operator")
    parser.add_argument("--json", type=run_path, metavar="FILE.jsonl/NAME")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for recipe in args.recipes:
        for millions in args.millions:
            for ranks in args.ranks:
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    rows.append(process.submit(measure, recipe, millions, ranks, args.steps).result())
    shown = [{key: value for key, value in row.items() if key != "operators"} for row in rows]
    print(table.markdown([{k: f"{v:,.2f}" if isinstance(v, float) else str(v) for k, v in r.items()} for r in shown]))
    if args.operators:
        for row in rows:
            print(f"\n{row['recipe']}, {row['ranks']} ranks:")
            print(", ".join(f"{name} {moved:.2f}" for name, moved in row["operators"].items()))
    write_run(args.json, {"config": metrics.environment(), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
