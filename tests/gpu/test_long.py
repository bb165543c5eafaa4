"""More keys than one program looks through: they are searched in parts."""

from __future__ import annotations

import pytest
import torch

import convnn
from convnn.functional import convnn as operator
from convnn_lab.bench.check import check
from tests.triton.runner import Case, step

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("n", "m"), [(300, 70_000), (40, 500_000)])
def test_values_and_gradients_agree_with_the_reference(n: int, m: int) -> None:
    case = Case(f"{n} of {m} keys", (n, m, 64, 64), k=16, lead=(1, 2), dtype=torch.bfloat16)
    leaves = case.leaves()
    check(case.name, leaves, 16)
    first, second = step(leaves, 16, {}, "triton"), step(leaves, 16, {}, "triton")
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_step_of_65536_tokens_holds_what_is_said() -> None:
    shape = (1, 4, 65_536, 64)
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    said = convnn.explain(*leaves, k=16)
    assert said.name == "triton"
    assert said.cost is not None
    assert said.cost.training_bytes is not None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    operator(*leaves, k=16).sum().backward()
    held = torch.cuda.max_memory_allocated() - before
    assert held < 2 * said.cost.training_bytes
    assert held < 2**30  # all scores would be 16 GiB for each head
