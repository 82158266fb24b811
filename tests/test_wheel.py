"""The wheel: built, audited, installed beside nothing but torch, and two ranks trained with it."""

import re

import pytest
from launch import ROOT, finish, start


@pytest.mark.slow
def test_wheel(tmp_path):
    process = start(["bash", str(ROOT / "scripts" / "wheel.sh"), str(tmp_path)])
    output = finish(process, timeout=1500)
    assert process.returncode == 0, output[-3000:]
    assert re.search(r"^hvd_compress \S+ with torch \S+: ok$", output, re.MULTILINE), output[-3000:]
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"hvd_compress-[\d.]+-cp310-abi3-manylinux_2_\d+_\w+\.whl", wheel.name), wheel
    assert len(list(tmp_path.glob("hvd_compress-*.tar.gz"))) == 1
