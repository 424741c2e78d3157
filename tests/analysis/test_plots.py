"""Pictures of what has few layers, or nothing to show."""

import warnings

import pytest
import torch
from torch import nn

from gramian.analysis import Settings, Subject, analyse, plots
from tests.analysis.subjects import tiny

pytestmark = pytest.mark.skipif(not plots.available(), reason="no matplotlib")


@pytest.mark.full
def test_a_largest_eigenvalue_that_occurs_often_has_the_ranks_from_one_on():
    result = analyse(tiny(), Settings(probes=0, eigenvalues=2))
    result["kfac"]["spectra"]["blocks.0"] = {"eigenvalues": [3.0, 1.0], "ranks": [5.0, 9.0]}
    figure = plots._spectra(result)
    lines = [line for axis in figure.axes for line in axis.get_lines()]
    assert all(line.get_xdata()[0] == 1 for line in lines)
    assert [[*line.get_ydata()] for line in lines if len(line.get_xdata()) == 3] == [[3.0, 3.0, 1.0]]


def test_a_model_without_products_of_sides_has_no_picture_of_them(tmp_path):
    batches = [{"input": torch.randn(5, 4), "labels": torch.randint(4, (5,))}]
    result = analyse(Subject(nn.Sequential(nn.LayerNorm(4)), batches), Settings(probes=0, eigenvalues=2))
    assert plots.draw(result, str(tmp_path)) == []


def test_zeros_are_drawn_without_a_warning():
    subject = tiny()
    with torch.no_grad():
        for p in subject.model.parameters():
            p.zero_()
    result = analyse(subject, Settings(probes=0, eigenvalues=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plots._depth(result).axes[0].get_yscale() == "linear"
