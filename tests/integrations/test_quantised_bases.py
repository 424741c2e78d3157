"""LoRA on frozen 8- and 4-bit weights, of torchao and bitsandbytes: the taps need nothing of the frozen weights."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gramian

pytestmark = [pytest.mark.full, pytest.mark.oracle]


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))


def with_torchao(model: nn.Module) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model.model, Int8WeightOnlyConfig())
    return model


def with_bitsandbytes(model: nn.Module, bits: int) -> nn.Module:
    from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit

    for name, layer in list(model.model.named_modules()):
        if type(layer) is not nn.Linear:
            continue
        made = (Linear4bit if bits == 4 else Linear8bitLt)(layer.in_features, layer.out_features, bias=False)
        given = layer.weight.data
        made.weight = (
            Params4bit(given, requires_grad=False, quant_type="nf4")
            if bits == 4
            else Int8Params(given, requires_grad=False, has_fp16_weights=False)
        )
        parent, _, own = name.rpartition(".")
        setattr(model.model.get_submodule(parent), own, made.to("cpu"))
    return model


def losses(model: nn.Module, x: Tensor) -> Tensor:
    logits = model(input_ids=x).logits[:, :-1]
    return F.cross_entropy(logits.mT, x[:, 1:], reduction="none").mean(1)


@pytest.mark.parametrize(
    "quantised",
    [with_torchao, lambda model: with_bitsandbytes(model, 8), lambda model: with_bitsandbytes(model, 4)],
    ids=["torchao int8", "bitsandbytes int8", "bitsandbytes nf4"],
)
def test_adapters_of_a_quantised_model_are_clipped_sample_by_sample(
    quantised: Callable[[nn.Module], nn.Module],
) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(quantised(llama()), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"]))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, p in trained.items():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.02)
    x = torch.randint(64, (5, 12), generator=torch.Generator().manual_seed(1))
    alone = [torch.autograd.grad(losses(model, x[i : i + 1]).sum(), list(trained.values())) for i in range(5)]
    norms_B = torch.stack([torch.cat([g.flatten() for g in one]).norm() for one in alone])
    limit = float(norms_B.median())
    factors_B = (limit / norms_B).clamp(max=1.0)
    engine, optimizer = gramian.PrivacyEngine(), torch.optim.SGD(list(trained.values()), lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.make_private(
            module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(x), batch_size=5), noise_multiplier=0.0,
            max_grad_norm=limit, loss_reduction="sum", poisson_sampling=False,
        )  # fmt: skip
    losses(model, x).sum().backward()
    torch.testing.assert_close(engine.last.norms_B, norms_B, rtol=1e-5, atol=0)
    for number, p in enumerate(trained.values()):
        want = sum(factors_B[i] * alone[i][number] for i in range(5))
        torch.testing.assert_close(p.grad, want, rtol=1e-4, atol=1e-4 * float(want.norm()))
    assert engine.proof["rows"] == "proven"
    optimizer.step()
    state = engine.state_dict()
    assert state["weights"] is not None
    engine.detach()
