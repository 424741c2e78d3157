"""The Methods page says what was recorded, and says so where something was not."""

import copy
import json

import pytest

from gramian.analysis import Settings, analyse, write_methods
from gramian.analysis.methods import methods
from tests.analysis.subjects import tiny

ITEMS = [
    "Damping values (λ_A, λ_G)",
    "Condition number clipping (κ_max)",
    "Update frequency",
    "Policy (all/auto/hybrid)",
    "T_effective per layer",
    "Condition numbers per layer (κ_A, κ_G)",
    "Eigenvalue clipping fraction",
    "DDP reduction mode",
    "World size (for multi-GPU)",
    "Storage device policy",
    "Dtype (fp16/bf16)",
]


@pytest.fixture(scope="module")
def result():
    return analyse(tiny(), Settings(damping=0.25, eigenvalues=2, probes=2, steps=2))


def test_every_item_of_the_checklist_is_answered_from_the_record(result, tmp_path):
    result = json.loads(json.dumps(result))
    write_methods(result, str(tmp_path / "methods.md"))
    page = (tmp_path / "methods.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("- [")]
    assert [line[6:].partition(": ")[0] for line in lines] == ITEMS
    assert "- [x] Damping values (λ_A, λ_G): joint: λ_A = 0.25, λ_G = 0.25" in page
    assert "- [ ] Eigenvalue clipping fraction: not recorded: nothing was inverted" in page
    assert "- [x] World size (for multi-GPU): 1" in page
    record = result["kfac"]["record"]["layers"]["blocks.0"]
    assert f"| blocks.0 | {record['T_kept']} | {record['N']:.0f} |" in page
    assert f"largest eigenvalue {result['ggn']['extremes']['largest']:.4g}" in page
    assert "20 tokens in 5 windows of 4 tokens, with 18 cross-entropy terms" in page


def test_the_page_follows_the_record_and_nothing_else(result):
    changed = copy.deepcopy(result)
    options = changed["kfac"]["record"]["options"]
    options["kfac_policy"], options["max_condition_number"] = "hybrid", 1234.0
    changed["kfac"]["record"]["world_size"] = 7
    for layer in changed["kfac"]["record"]["layers"].values():
        layer["clip_joint"] = {"count": 1, "total": 4, "mass": 0.0, "floor": 0.0}
    del changed["data"]["digest"], changed["ggn"]
    changed["notes"] = ["Not covered by ε."]
    page = methods(changed)
    assert "Policy (all/auto/hybrid): hybrid" in page and "κ_max): 1234" in page
    assert "World size (for multi-GPU): 7" in page and "nothing was joined" not in page
    assert "- [x] Eigenvalue clipping fraction: 25.00% of all eigenvalues" in page
    assert "data digest not recorded" in page and "Gauss-Newton" not in page and "Not covered by ε." in page
