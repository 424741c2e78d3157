"""Compiled modules run as written inside `run_eagerly`, whatever threads do at the same time."""

import threading

import torch
from torch._dynamo.testing import CompileCounter

from gramian.taps.model.run_eagerly import run_eagerly


def test_compiling_goes_on_when_threads_leave_in_the_order_they_came() -> None:
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with run_eagerly():
            first_is_in.set()
            assert second_is_in.wait(60)
        first_is_out.set()

    def second() -> None:
        assert first_is_in.wait(60)
        with run_eagerly():
            second_is_in.set()
            assert first_is_out.wait(60)

    counter = CompileCounter()
    double = torch.compile(lambda x: 2 * x, backend=counter)
    threads = [threading.Thread(target=body) for body in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    double(torch.ones(3))
    assert counter.frame_count == 1


def test_nothing_is_compiled_inside() -> None:
    counter = CompileCounter()
    double = torch.compile(lambda x: 2 * x, backend=counter)
    with run_eagerly(), run_eagerly():
        assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
    assert counter.frame_count == 0
