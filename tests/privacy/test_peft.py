"""Adapters of the `peft` library train privately as they are: no layer is replaced and nothing is wrapped.

Small random models, nothing is loaded: GPT-2, whose projections are `Conv1D` with the weight as [in, out], and Llama. Llama's
own norm computes in float32 whatever the model's dtype; `nn.RMSNorm` stands in its place, so that everything is float64.
"""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramian
from gramian.oracles.clipped_sum import clip, clipped_sum
from gramian.oracles.single_sample import per_sample_gradients
from gramian.privacy.clipping.clip_factors import SLACK
from tests.kit.matrix import sample
from tests.kit.refusals import refusal
from tests.privacy.problems import assert_sums, gradients, private, weights
from tests.statistics.problems import assert_norms

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs, pytest.mark.filterwarnings("ignore::UserWarning:peft")]

STORAGES = ("auto", "bookkeeping", "keep", "two_pass")
VOCABULARY = 13
EXPECTED_BATCH = 5  # of batches of 4 samples


def gpt2(tied: bool = True) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=7, n_embd=12, n_layer=2, n_head=3, n_inner=15, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, tie_word_embeddings=tied,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama(own_norm: bool = False, width: int = 10) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=15, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=6, max_position_embeddings=7, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parent in [] if own_norm else list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(parent, name, nn.RMSNorm(width, eps=child.variance_epsilon))
    return model


CONV1D = {"fan_in_fan_out": True}
ALL = ["c_attn", "c_fc", "c_proj"]
LORA: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "gpt2, attention": (gpt2, {"target_modules": ["c_attn"], **CONV1D}),
    "gpt2, every projection": (gpt2, {"target_modules": ALL, **CONV1D}),
    "gpt2, rank-stabilised": (gpt2, {"target_modules": ALL, "use_rslora": True, **CONV1D}),
    "gpt2, DoRA": (gpt2, {"target_modules": ALL, "use_dora": True, **CONV1D}),
    "gpt2, a norm saved": (gpt2, {"target_modules": ["c_attn"], "modules_to_save": ["ln_f"], **CONV1D}),
    "gpt2, projections saved": (gpt2, {"target_modules": ["c_attn"], "modules_to_save": ["c_proj"], **CONV1D}),
    "gpt2, the head saved": (gpt2, {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"], **CONV1D}),
    "gpt2, the table saved": (gpt2, {"target_modules": ["c_attn"], "modules_to_save": ["wte"], **CONV1D}),
    "gpt2, table and head saved as one": (
        gpt2,
        {"target_modules": ["c_attn"], "modules_to_save": ["wte"], "ensure_weight_tying": True, **CONV1D},
    ),
    "gpt2, embeddings": (lambda: gpt2(tied=False), {"target_modules": ["wte", "wpe", "c_attn"], **CONV1D}),
    "gpt2, some tokens": (gpt2, {"target_modules": ["c_attn"], "trainable_token_indices": [1, 4], **CONV1D}),
    "gpt2, biases": (gpt2, {"target_modules": ["c_attn"], "bias": "all", **CONV1D}),
    "gpt2, biases of adapters": (gpt2, {"target_modules": ["c_attn"], "lora_bias": True, **CONV1D}),
    "llama, attention": (llama, {"target_modules": ["q_proj", "v_proj"]}),
    "llama, every linear": (llama, {"target_modules": "all-linear"}),
    "llama, rank-stabilised": (llama, {"target_modules": "all-linear", "use_rslora": True}),
    "llama, DoRA": (llama, {"target_modules": ["q_proj", "k_proj", "down_proj"], "use_dora": True}),
    "llama, table and head saved": (
        llama,
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "llama, norms saved": (llama, {"target_modules": ["o_proj"], "modules_to_save": ["norm", "input_layernorm"]}),
    "llama, ranks by pattern": (
        llama,
        {
            "target_modules": ["q_proj", "v_proj"],
            "layers_to_transform": [1],
            "rank_pattern": {"q_proj": 3},
            "alpha_pattern": {"v_proj": 5},
        },
    ),
}


def adapted(base: nn.Module, **options: Any) -> nn.Module:
    """The model with LoRA in float64; no factor begins at zero, which would hide the other's gradient."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights, which are meant here
        config = LoraConfig(**{"r": 2, "lora_alpha": 3, "lora_dropout": 0.0, "init_lora_weights": False, **options})
        return get_peft_model(base, config).double()


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    base, options = LORA[name]
    return adapted(base(), **options)


def tokens(samples: int = 4, length: int = 6) -> Tensor:
    return torch.randint(VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(1))


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """The mean over samples of the mean over tokens; logits of virtual tokens in front are left out."""
    logits = model(input_ids=ids).logits[:, -ids.shape[1] :]
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1).mean()


def limit_of(per_sample: dict[str, Tensor]) -> float:
    """A clip norm that clips half of the samples: between the norms in the middle."""
    return float(torch.cat([g.flatten(1) for g in per_sample.values()], 1).norm(dim=1).quantile(0.5))


def frozen(model: nn.Module) -> dict[str, Tensor]:
    """Everything that is not trained, buffers too, copied."""
    found = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


def without_gradients(model: nn.Module) -> bool:
    return all(p.grad is None for p in model.parameters() if not p.requires_grad)


def check(model: nn.Module, ids: Tensor, tolerance: float = 1e-9, **options: Any) -> None:
    """A private backward brings the loop's clipped sum."""
    want = per_sample_gradients(model, loss, (ids,))
    limit = limit_of(want)
    with private(model, limit, **options) as run:
        run.engine.backward(loss(model, ids))
        assert_sums(run.gradients(), clip(want, limit).totals, tolerance)
        assert without_gradients(model)


# ---- LoRA -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, storage", sample(list(product(LORA, STORAGES)), 25))
def test_a_private_step_moves_the_adapters_by_the_loops_clipped_sum_and_nothing_else(name: str, storage: str) -> None:
    model, ids = make(name), tokens()
    per_sample = per_sample_gradients(model, loss, (ids,))
    limit = limit_of(per_sample)
    want = clip(per_sample, limit)
    assert (want.factors_B < 1).any() and (want.factors_B == 1).any()
    assert all(bool(g.any()) for g in want.totals.values())  # no gradient is right because it is zero
    rest, before = frozen(model), weights(model)
    with private(model, limit, batch_size=EXPECTED_BATCH, clipping=storage) as run:
        assert run.model is model
        run.engine.backward(loss(model, ids))
        found = run.gradients()
        assert without_gradients(model)
        assert_norms(run.engine.last.norms_B, want.norms_B, 1e-9)
        run.optimizer.step()
        divided = run.gradients()
        assert without_gradients(model)
    assert_sums(found, want.totals, 1e-9)
    assert_sums({key: g * EXPECTED_BATCH for key, g in divided.items()}, want.totals, 1e-9)
    after = weights(model)
    assert all(torch.equal(after[key], before[key] - divided[key]) for key in before)
    assert all(torch.equal(now, rest[key]) for key, now in frozen(model).items())


def _anatomy(model: nn.Module) -> dict[str, Any]:
    """Whatever somebody could have left behind: classes, objects, attributes, forwards, hooks, parameters."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        own = vars(module)
        found[name] = (id(module), type(module), sorted(own), own.get("forward"), [len(own[hook]) for hook in hooks])
    for name, p in model.named_parameters():
        found[f"parameter {name}"] = (id(p), type(p), p.requires_grad, p.dtype, len(p._backward_hooks or {}))
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", LORA)
def test_detach_leaves_the_model_as_it_was_and_adapters_merge(name: str) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    model, ids = make(name), tokens()
    with torch.no_grad():
        plain = model(input_ids=ids).logits
    untouched, before = copy.deepcopy(model), _anatomy(model)
    with private(model, 0.5, noise_multiplier=1.0) as run:
        assert _anatomy(model) != before  # else the comparison sees nothing
        loss(model, ids).backward()
        assert run.engine.detach() is model
    assert _anatomy(model) == before
    assert all(p.grad is None for p in model.parameters())  # clipped, but without noise
    assert all(torch.equal(now, untouched.state_dict()[key]) for key, now in model.state_dict().items())
    loss(model, ids).backward()
    loss(untouched, ids).backward()
    ordinary = gradients(untouched)
    assert all(torch.equal(g, ordinary[key]) for key, g in gradients(model).items())

    with private(model, 0.5, noise_multiplier=1.0) as run:
        start = weights(model)
        loss(model, ids).backward()
        run.optimizer.step()
    assert not any(torch.equal(now, start[key]) for key, now in weights(model).items())
    model.eval()
    with torch.no_grad():
        trained = model(input_ids=ids).logits
        merged = model.merge_and_unload()
        again = merged(input_ids=ids).logits
    assert type(merged) is type(LORA[name][0]())
    assert not any(isinstance(module, BaseTunerLayer) for module in merged.modules())
    torch.testing.assert_close(again, trained, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(trained, plain)


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param("gpt2, DoRA", marks=pytest.mark.full), "llama, every linear"])
def test_a_private_loop_and_its_adapters_in_another_model(name: str) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    model, fresh, data = make(name), make(name), tokens(24)
    names = list(get_peft_model_state_dict(model))
    engine = gramian.PrivacyEngine(accountant="rdp", insecure_reproducible=True, seed=0)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    options = {"noise_multiplier": 0.8, "poisson_sampling": True, "data": [data], "batch_size": 6}
    rest = frozen(model)
    with private(model, 1.0, engine=engine, optimizer=adamw, **options) as run:
        engine.check_independence(loss, (data[:4],))
        for (ids,) in run.loader:
            run.optimizer.zero_grad()
            loss(model, ids).backward()
            run.optimizer.step()
        assert list(get_peft_model_state_dict(model)) == names
        with torch.no_grad(), model.disable_adapter(), fresh.disable_adapter():
            assert torch.equal(model(input_ids=data).logits, fresh(input_ids=data).logits)
    assert engine.steps == len(run.loader) and 0 < engine.get_epsilon(1e-3) < 50
    assert all(torch.equal(now, rest[key]) for key, now in frozen(model).items())
    set_peft_model_state_dict(fresh, get_peft_model_state_dict(model))
    with torch.no_grad():
        assert torch.equal(fresh(input_ids=data).logits, model(input_ids=data).logits)


@pytest.mark.full
@pytest.mark.parametrize("name, storage", sample(list(product(["gpt2, DoRA", "llama, every linear"], STORAGES)), 4))
def test_checkpointed_blocks(name: str, storage: str) -> None:
    model = make(name).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    check(model, tokens(), clipping=storage)


@pytest.mark.parametrize("dora", [False, pytest.param(True, marks=pytest.mark.full)])
def test_dropout_of_adapters_is_the_one_that_the_forward_drew(dora: bool) -> None:
    # The loop draws other masks: with a clip norm that clips nobody, the sum is the ordinary gradient of the same draw.
    torch.manual_seed(0)
    model = adapted(gpt2(), target_modules=ALL, lora_dropout=0.4, use_dora=dora, **CONV1D).train()
    plain, ids = copy.deepcopy(model), tokens()
    torch.manual_seed(2)
    loss(plain, ids).backward()
    with private(model, 1e6) as run:
        torch.manual_seed(2)
        loss(model, ids).backward()
        assert_sums(run.gradients(), {key: 4 * g for key, g in gradients(plain).items()}, 1e-9)


@pytest.mark.parametrize("active", [["default", "second"], ["second"]])
def test_of_several_adapters_the_active_ones_are_trained(active: list[str]) -> None:
    from peft import LoraConfig

    model = make("llama, attention")
    model.add_adapter("second", LoraConfig(r=3, target_modules=["v_proj", "up_proj"], init_lora_weights=False))
    model.base_model.set_adapter(active)
    trained = {key.split(".")[-2] for key, p in model.named_parameters() if p.requires_grad}
    assert trained == set(active)
    check(model.double(), tokens())


@pytest.mark.parametrize("saved", [None, ["norm"]])
def test_llama_with_its_own_norm_is_right_to_float32(saved: list[str] | None) -> None:
    torch.manual_seed(0)
    model, ids = adapted(llama(own_norm=True), target_modules="all-linear", modules_to_save=saved), tokens()
    want = per_sample_gradients(model, loss, (ids,))
    limit = limit_of(want)
    formed = torch.float64 if saved is None else torch.float32
    with private(model, limit) as run:
        loss(model, ids).backward()
        assert_sums(run.gradients(), clip(want, limit / (1 + SLACK[formed])).totals, 1e-6)


# ---- what has no formula --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width, samples", sample([(10, 4), (12, 4), (4, 4), (10, 2)], 3))
def test_dora_on_a_table_is_right_in_a_batch_and_one_sample_at_a_time(width: int, samples: int) -> None:
    # Its magnitudes leave their module as one vector [width] for all samples, which may look like rows of samples.
    torch.manual_seed(0)
    model = adapted(llama(width=width), target_modules=["embed_tokens", "q_proj"], use_dora=True)
    ids = tokens(samples)
    want = clipped_sum(model, loss, (ids,), 0.1)
    alike = width == samples  # then the magnitudes cannot be told from rows of samples
    with (
        private(model, 0.1) as run,
        refusal(r"embed_tokens\.lora_magnitude_vector\.default \(DoraEmbedding") if alike else nullcontext(),
    ):
        loss(model, ids).backward()
        assert_sums(run.gradients(), want.totals, 1e-9)
    with private(model, 0.1, max_physical_batch=1) as run:
        for i in range(samples):
            loss(model, ids[i : i + 1]).backward()
        assert_sums(run.gradients(), want.totals, 1e-9)


def _other(kind: str) -> nn.Module:
    import peft

    configs = {
        "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "VeRA": lambda: peft.VeraConfig(r=2, target_modules=["q_proj", "o_proj"]),
        "LoKr": lambda: peft.LoKrConfig(r=2, target_modules=["q_proj"], init_weights=False),
        "OFT": lambda: peft.OFTConfig(r=0, oft_block_size=5, target_modules=["q_proj"], init_weights=False),
        "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    }
    torch.manual_seed(0)
    return peft.get_peft_model(llama(), configs[kind]()).double()


@pytest.mark.parametrize("kind", ["IA3", "VeRA", "LoKr", "OFT", "prefix"])
def test_other_adapters(kind: str) -> None:
    check(_other(kind), tokens(length=4))


# ---- prompts, prefixes and adapters of raw parameters -----------------------------------------------------------------------


def prompted(kind: str, base: Callable[[], nn.Module] = gpt2, **options: Any) -> nn.Module:
    import peft

    torch.manual_seed(0)
    config = getattr(peft, kind)(task_type=peft.TaskType.CAUSAL_LM, num_virtual_tokens=1, **options)
    return peft.get_peft_model(base(), config).double().train()


PROMPTS: dict[str, Callable[[], nn.Module]] = {
    "prompt tuning": lambda: prompted("PromptTuningConfig"),
    "prompt tuning, llama": lambda: prompted("PromptTuningConfig", llama),
    "p-tuning": lambda: prompted("PromptEncoderConfig", encoder_hidden_size=6),
    "prefix tuning": lambda: prompted("PrefixTuningConfig"),
    "prefix tuning, projected": lambda: prompted("PrefixTuningConfig", prefix_projection=True, encoder_hidden_size=6),
}


@pytest.mark.few_proofs(every=1)
@pytest.mark.parametrize(
    "name", ["prompt tuning", *(pytest.param(n, marks=pytest.mark.full) for n in PROMPTS if n != "prompt tuning")]
)
def test_prompts_and_prefixes_are_trained_by_the_loops_clipped_sum(name: str) -> None:
    check(PROMPTS[name](), tokens())


def test_a_prompt_that_an_lstm_encodes_is_right_in_a_batch_and_one_sample_at_a_time() -> None:
    # What the LSTM returns has B rows already, and is repeated for the batch again.
    lstm = {"encoder_reparameterization_type": "LSTM", "encoder_hidden_size": 6}
    model, ids = prompted("PromptEncoderConfig", **lstm), tokens(length=4)
    want = clipped_sum(model, loss, (ids,), 0.1)
    with private(model, 0.1) as run:
        loss(model, ids).backward()
        assert_sums(run.gradients(), want.totals, 1e-9)
    with private(model, 0.1, max_physical_batch=1) as run:
        for i in range(4):
            loss(model, ids[i : i + 1]).backward()
        assert_sums(run.gradients(), want.totals, 1e-9)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=12, intermediate_size=10, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=7, use_cache=False,
        experts_implementation="eager",
    )  # fmt: skip
    return MixtralForCausalLM(config)


@pytest.mark.parametrize(
    "options",
    [
        {"target_parameters": ["mlp.gate.weight"]},
        pytest.param(
            {"target_modules": ["q_proj", "gate"], "target_parameters": ["mlp.experts.gate_up_proj"]},
            marks=pytest.mark.full,
        ),
    ],
)
def test_adapters_of_raw_parameters_are_trained_by_the_loops_clipped_sum(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    check(adapted(mixtral(), **options).train(), tokens(), 1e-5)  # Mixtral's own norms and router compute in float32


class Quantised(Tensor):
    """Integers and a scale, which can be detached and multiplied out and nothing else, as torchao's quantised weights."""

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> "Quantised":
        return Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, whole: Tensor, scale: Tensor) -> None:
        self.whole, self.scale = whole, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> "Quantised":
        return Quantised(inner["whole"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Quantised(args[0].whole, args[0].scale)
        raise NotImplementedError(str(function))


class QuantisedLinear(nn.Module):
    def __init__(self, weight: Quantised) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.whole * self.weight.scale).mT


def test_a_frozen_weight_may_be_quantised() -> None:
    torch.manual_seed(0)
    whole, scale = torch.randint(-128, 128, (5, 6), dtype=torch.int8), torch.full((1,), 0.01, dtype=torch.float64)
    plain = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)).double()
    plain[0].weight = nn.Parameter(whole * scale, requires_grad=False)
    x = torch.randn(4, 6, dtype=torch.float64)
    gradients_B = per_sample_gradients(plain, lambda net, rows: net(rows).square().sum(), (x,))
    model = nn.Sequential(QuantisedLinear(Quantised(whole, scale)), nn.Tanh(), plain[2])
    with private(model, 0.7, loss_reduction="sum") as run:
        run.model(x).square().sum().backward()
        wanted = clip({n: g for n, g in gradients_B.items() if n[0] == "2"}, 0.7 / (1 + SLACK[torch.float64])).totals
        for name, want in wanted.items():
            torch.testing.assert_close(model.get_parameter(name).grad, want, rtol=1e-9, atol=1e-12)
        run.optimizer.step()
        before = run.engine.state_dict()["weights"]
        scale.mul_(2)
        assert not torch.equal(before, run.engine.state_dict()["weights"])
