"""What one exchange costs, an entry: the bytes that its operators read and write, which would cross memory without
caches, and memory."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
from bench_round import Rank, measure

#: By recipe, at 4 ranks. Lower them when they fall.
MOST = {
    "low_bit": 42.2,
    "low_bit, length kept": 41.8,
    "low_bit, delay 1": 58.2,
    "diloco": 108.1,
    "sparseloco": 197.0,
}


@pytest.mark.parametrize(("recipe", "most"), MOST.items())
def test_bytes_through_memory(recipe, most):
    rank = Rank(recipe, 1, 4)
    rank.step()
    traffic = rank.traffic()
    assert 0.99 * most < sum(traffic.values()) <= most, traffic


#: By ranks, the most bytes of memory a parameter of ``low_bit``, beside weights and gradients: between exchanges and at
#: the peak of one. Lower them when they fall.
MOST_MEMORY = {2: (8.8, 11.4), 4: (8.8, 10.4)}


@pytest.mark.parametrize("ranks", MOST_MEMORY)
def test_memory(ranks):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        found = process.submit(measure, "low_bit", 24, ranks, 1).result()
    held, peak = found["held_bytes_per_entry"], found["peak_bytes_per_entry"]
    most_held, most = MOST_MEMORY[ranks]
    assert 8 < held <= most_held and held < peak <= most, found
