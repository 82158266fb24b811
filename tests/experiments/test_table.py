"""scripts/experiments/table.py, and results of older runs."""

import table


def result(compression="none", seed=0, accuracy=0.9, ranks=4, **config):
    history = [
        {"epoch": e, "train_loss": 1 / e, "test_accuracy": accuracy * e / 2, "wire_bytes": 1e6 * e, "seconds": e}
        for e in (1, 2)
    ]
    return {
        "test_accuracy": accuracy, "train_loss": 0.5, "wire_ratio": 40.0, "wire_ratio_last": 52.2,
        "wire_bytes_per_step": 12345.6, "step_ms_median": 20.0, "compress_ms_median": 1.5,
        "replicas_equal": True, "ranks": ranks, "history": history,
        "config": {"compression": compression, "seed": seed, "lr": 0.1, "json": f"{seed}.json", **config},
    }  # fmt: skip


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_table_joins_seeds_and_names_what_differs():
    rows = cells(
        table.table(
            [
                result(),
                result("iwp", seed=0, accuracy=0.88, density=1 / 64, leaders=None),
                result("iwp", seed=1, accuracy=0.86, density=1 / 64, leaders=None),
                result("iwp", density=1 / 64, leaders=1),
                result("iwp", density=0.03, leaders=1),
            ]
        )
    )[2:]
    assert [row[0] for row in rows] == ["none", "iwp", "iwp, leaders 1", "iwp, leaders 1"]
    assert [row[1] for row in rows] == ["1", "1/64", "1/64", "1/33.3"]
    assert rows[0][2:] == ["0.9000", "0.500", "40.0", "20.0", "1.50"]
    assert rows[1][2] == "0.8700 ± 0.0100 (2)"


def test_table_names_unequal_replicas():
    bad = result(seed=1)
    bad["replicas_equal"] = False
    assert "Replicas differ: none." in table.table([result(), bad])


def test_an_option_that_an_older_result_did_not_have_does_not_part_rows():
    rows = [result(nodes=None), result(seed=1), result(seed=2, nodes=2)]
    assert [row[0] for row in cells(table.table(rows))[2:]] == ["none", "none, nodes 2"]
