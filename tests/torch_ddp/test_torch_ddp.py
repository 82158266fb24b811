"""torch's own tests of DistributedDataParallel, with a compressor that sends everything as the hook of every model.

torch ships them in its wheel, for GPUs; :mod:`shim` runs them on the CPU. What passes without a compressor must pass
with one, except for the tests listed here. A listed test must fail, with the error given beside its reason: take it
from its list if it passes, and look for the fault if it fails in another way.
"""

import json
import os
import re
import sys
from typing import Any, NamedTuple

import pytest
import torch
from launch import ROOT, finish, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the lists are of the tests of torch 2.13"),
]

SCRIPT = ROOT / "tests" / "torch_ddp" / "run_torch_tests.py"


class Reason(NamedTuple):
    text: str
    #: A regular expression that the error contains.
    error: str


_DISABLED = Reason("disabled in torch", r"github\.com/pytorch/pytorch/(issues|pull)|flakiness")
_SYNC_BATCH_NORM = Reason("torch's SyncBatchNorm is for GPUs only", "SyncBatchNorm layers only work with GPU modules")
_EVENTS = Reason("DDP's mixed_precision= waits for events of the device", "cpu backend doesn't support events")
_STREAMS = Reason("an optimizer in backward waits for a stream of the device", "Cannot access accelerator device")

#: Those that do not pass without a compressor.
NOT_ON_CPU = {
    "test_DistributedDataParallel": _DISABLED,
    "test_DistributedDataParallel_non_default_stream": _DISABLED,
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": _DISABLED,
    "test_ddp_has_finalized": _DISABLED,
    "test_ddp_hook_pickling_powerSGD": _DISABLED,
    "test_ddp_model_diff_shape_across_ranks": _DISABLED,
    "test_ddp_profiling_autograd_profiler": _DISABLED,
    "test_ddp_profiling_execution_trace": _DISABLED,
    "test_ddp_sync_bn_training_vs_eval": _DISABLED,
    "test_DistributedDataParallel_SyncBatchNorm": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_half": _SYNC_BATCH_NORM,
    "test_ddp_inference": _SYNC_BATCH_NORM,
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": _SYNC_BATCH_NORM,
    "test_sync_bn_logged": _SYNC_BATCH_NORM,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": _EVENTS,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": _EVENTS,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": _EVENTS,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": _EVENTS,
    "test_ddp_apply_optim_in_backward": _STREAMS,
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": _STREAMS,
    "test_ddp_apply_optim_in_backward_ignored_params": _STREAMS,
    "test_ddp_device": Reason("asks for the number of the module's GPU", "None mismatch: None is not"),
    "test_ddp_logging_data_gpu": Reason("asks for device_ids in DDP's logging data", "String comparison failed: ''"),
}

# The rank that is left alone raises the error; the others lose their connection to it.
_JOIN = Reason("join() is not supported", r"does not support DistributedDataParallel\.join\(\)|by peer")
_PICKLE = Reason("pickles the model with its hook; a compressor belongs to its process", "belongs to its process")

#: Those that pass without a compressor, and not with one.
NOT_WITH_HOOK = {
    "test_DistributedDataParallelCPU": _PICKLE,
    "test_DistributedDataParallelCPU_grad_is_view": _PICKLE,
    "test_ddp_comm_hook_logging": Reason("asserts that a new model has no hook", "ddp_hook is not None"),
    "test_ddp_grad_div_uneven_inputs": _JOIN,
    "test_ddp_join_model_equivalence": _JOIN,
    "test_ddp_join_respects_forward_sync_buffers_false": _JOIN,
    "test_ddp_native_mixed_precision_ignored_params": Reason(
        "DDP registers a hook of its own for mixed_precision=", "can only be called once"
    ),
    "test_ddp_sink_noclone": Reason("forbids clone() in backward, in the hook, too", "clone encountered"),
}
_COUNTED = Reason("counts the all-reduces of a step: one; this method has two", "Expected 6 but got 12")
_TWO_ALLREDUCES = {**NOT_WITH_HOOK, "test_ddp_profiling_torch_profiler": _COUNTED}
#: By method. These average without rounding that the tests would notice.
NOT_WITH = {"topk": NOT_WITH_HOOK, "dgc": NOT_WITH_HOOK, "iwp": _TWO_ALLREDUCES, "demo": _TWO_ALLREDUCES}

#: Those that pass, and in which no backward pass gets as far as the hook.
WITHOUT_EXCHANGE = {
    "test_DistributedDataParallel_requires_grad",
    "test_compute_bucket_assignment_by_size_sparse_error_without_logger",
    "test_ddp_broadcast_buffers_deprecation_warning",
    "test_ddp_build_debug_param_to_name_mapping",
    "test_ddp_build_debug_param_to_name_mapping_requires_grad",
    "test_ddp_device_mesh_initialization",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_ddp_multiple_nested_unused_params_err_ignore_params",
    "test_ddp_multiple_nested_unused_params_error",
    "test_ddp_namedtuple",
    "test_ddp_python_error_logged",
    "test_ddp_sync_module_states",
    "test_ddp_uneven_input_exception",
    "test_ddp_unused_params_rebuild_buckets_exception",
    "test_ddp_zero_output_features",
    "test_get_data_parallel_params",
    "test_stateless_api_with_ddp",
    "test_verify_model_across_rank_with_logger",
    "test_verify_model_across_rank_without_logger",
}


def run_tests(method: str, report: Any, tests: list[str], timeout: float) -> dict[str, dict[str, Any]]:
    """Runs torch's tests. Returns what run_torch_tests.py says of each, by name."""
    process = start(
        [sys.executable, "-W", "ignore", str(SCRIPT), method, str(report), *tests],
        PYTHONPATH=os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        TORCHINDUCTOR_CACHE_DIR=str(report.parent / "inductor"),  # one for all methods
        GLOO_SOCKET_IFNAME="lo",
    )
    output = finish(process, timeout)
    assert process.returncode == 0, output[-3000:]
    return {row["test"]: row for row in map(json.loads, report.read_text().splitlines())}


def compare(rows: dict[str, dict[str, Any]], expected: dict[str, Reason]) -> None:
    """Fails if other tests than the expected ones have not passed, or with other errors."""
    problems = [f"{name} is listed, and there is no such test" for name in expected.keys() - rows.keys()]
    for name, row in rows.items():
        if row["outcome"] == "passed" and name in expected:
            problems.append(f"{name} passes: remove it from the list ({expected[name].text})")
        elif row["outcome"] != "passed" and name not in expected:
            problems.append(f"{name} {row['outcome']}:\n{row['why'][-2000:]}")
        elif row["outcome"] != "passed" and not re.search(expected[name].error, row["why"]):
            problems.append(f"{name} {row['outcome']}, and not because: {expected[name].text}\n{row['why'][-2000:]}")
    assert not problems, "\n".join(problems)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("torch_ddp")


@pytest.fixture(scope="session")
def stock(folder):
    return run_tests("stock", folder / "stock", [], timeout=1200)


def test_without_a_compressor(stock):
    compare(stock, NOT_ON_CPU)
    assert len(stock) == 101, "all tests of DistributedDataParallel but a long one"


@pytest.mark.parametrize("method", NOT_WITH)
def test_with_a_compressor(folder, stock, method):
    passed = [name for name, row in stock.items() if row["outcome"] == "passed"]
    rows = run_tests(method, folder / method, passed, timeout=1200)
    compare(rows, NOT_WITH[method])
    silent = {name for name, row in rows.items() if row["outcome"] == "passed" and not row["calls"]}
    assert silent == WITHOUT_EXCHANGE, silent ^ WITHOUT_EXCHANGE
