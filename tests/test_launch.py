"""The launcher of the tests reports which case failed or hung, and on which rank."""

import pytest
from launch import PARALLEL, launch

CHECK = str(PARALLEL / "check_training.py")


def test_a_failing_case_is_named():
    with pytest.raises(pytest.fail.Exception, match=r"rank-[01]: unfinished case: iwp no_such_case(.|\n)*KeyError"):
        launch("run.sh", ["--ddp", "2", CHECK, "--host", "ddp", "iwp:no_such_case"], timeout=120)


def test_a_hanging_case_is_named_with_its_stack():
    arguments = ["--ddp", "2", CHECK, "--host", "ddp", "--case-limit", "2", "iwp:thousand_steps"]
    with pytest.raises(pytest.fail.Exception, match=r"unfinished case: iwp thousand_steps\n(.|\n)*common_cases.py"):
        launch("run.sh", arguments, timeout=120)


def test_a_case_that_drops_an_exchange_in_progress_fails():
    with pytest.raises(pytest.fail.Exception, match=r"iwp dropped_in_progress\n(.|\n)*dropped while an exchange was"):
        launch("run.sh", ["--ddp", "2", CHECK, "--host", "ddp", "iwp:dropped_in_progress"], timeout=120)


def test_processes_are_ended_after_the_time_limit():
    with pytest.raises(pytest.fail.Exception, match="took more than 6 s"):
        launch("run.sh", ["--ddp", "2", CHECK, "--host", "ddp", "iwp:thousand_steps"], timeout=6)
