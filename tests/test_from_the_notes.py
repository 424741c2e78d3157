"""The page for readers of earlier notes: it has every name of the notes, and what it calls ours exists."""

import argparse
import dataclasses
import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import gramian
from gramian.cli import COMMANDS, OLD_FLAGS
from gramian.cli.profile.profile import USAGES as PROFILES
from gramian.cli.verify import USAGES as PROOFS
from gramian.train.config.config import SECTIONS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/how-to/from_the_notes.md").read_text(encoding="utf-8")

NAMES = {
    "TensorScope's K-FAC notes": """
        KFACNaturalGradient damping damping_A damping_G max_condition_number use_eigenvalue_correction update_freq
        kfac_use_woodbury kfac_policy "all" "auto" "hybrid" woodbury_store_device woodbury_dtype kfac_distributed_reduce
        "gram" "gather" "none" kfac_eps lm_head collect_kfac_factors kfac_factors advanced_collector
        _update_kfac_factors set_use_kfac FisherCollector token_total _compute_layer_natural_gradient
        _compute_powered_natural_gradient _apply_fisher_power compute_fisher_vector_product KFACFisherOperator.kfac_mv
        fisher_lanczos_unified.py compute_capacity_metrics eigvals_A eigvals_G torch.linalg.eigvalsh
        torch.cuda.mem_get_info estimate_eigendecomp_memory free_mem required _stabilize_matrix M_stable eigvecs
        eigvals_clipped eigvecs_cpu eigvals_clipped_cpu λ_clipped orig_device orig_dtype pinv U S S_inv lambda_inv
        local_gram global_gram G_global dist.all_reduce dist.get_world_size T_global_tensor retain_graph activations
        gradients activations.clear gradients.clear model.zero_grad torch.cuda.empty_cache A.cpu().float()
        unified_model_analysis.py fisher/kfac_utils.py fisher/core/fisher_collector_advanced.py train.py --steps --gpus
        --nproc_per_node collect_kfac_single_gpu collect_kfac_ddp fisher_1gpu fisher_2gpu kfac_gram kfac_gather caplog
        WOODBURY_ENHANCEMENTS_PHASE2.md JUNIOR_CODER_REVIEW_SUMMARY.md INTERN_FIXES_APPLIED.md
        CODE_VERIFICATION_WELFORD.md FISHER_ACCUMULATION_METHODS.md TRUE_FISHER_LM_HEAD_THEORY.md in_dim out_dim T=
        T_effective T_local T_global world_size memory= total_mb storage= device_str dtype= dtype_str λ_A λ_G κ_A κ_G
        kappa_A kappa_G κ_max policy= update_freq= n_woodbury n_eig n_clipped_A A_decomp['eigvals']
    """,
    "The flash-clipping fork of Opacus": """
        verify_correctness.py --use-fsdp --verbose --enable-profiling torchrun torch.distributed.launch
        profile_fsdp_bottlenecks.py --seq-lengths --batch-size --cpu --use-flash OPACUS_PROFILE_FSDP
        memory_test/fastdp_bookkeeping/ triton_kernels.py opacus/grad_sample/ dtype_acc ret[layer.weight]
        ret[layer.bias] torch.ones(B) grad_sample_module_fast_gradient_clipping_fsdp.py capture_backprops_hook
        get_norm_sample fast_gradient_clipping_utils.py PROFILING_GUIDE.md OPTIMIZATION_IMPLEMENTATIONS.md
        IMPLEMENTATION_SUMMARY.md /f.plan.md
    """,
    "The ASNN-Goose notes": """
        torch.amp.autocast torch.amp.GradScaler scaler.scale scaler.unscale_ scaler.step scaler.update scaler.get_scale
        torch.nn.utils.clip_grad_norm_ max_norm lr fused foreach set_to_none accumulation_steps compute_loss
        effective_batch_size no_sync is_sync_step nullcontext lr_lambda progress warmup_steps total total_steps min_lr
        base_lr torch.compile default reduce-overhead max-autotune dynamo.explain explanation.graph_breaks torch.where
        print(loss.item()) torch.utils.checkpoint.checkpoint self.layers F.scaled_dot_product_attention FSDP
        use_orig_params sharding_strategy ShardingStrategy.FULL_SHARD DataLoader batch_size num_workers prefetch_factor
        pin_memory persistent_workers non_blocking batch['input_ids'] eval_interval expected_loss math.log(C)
        expected_kd_loss param.grad save_checkpoint tmp_path torch.save os.rename model optimizer scheduler scaler step
        best_ppl check_nan_hook register_full_backward_hook loss_moving_avg last_good_checkpoint model.load_state_dict
        g['lr'] torch.no_grad torch.inference_mode t_logits teacher(ids) teacher.config.use_cache teacher_logits
        batch['id'] teacher_logits.pt
    """,
}
"""{source: names in code that its notes use, each once}; what has no name in code is in the words of the page."""
IN_WORDS = {
    "TensorScope's K-FAC notes": (
        "true Fisher", "robust Cholesky", "Welford", "Methods section", "reproducibility checklist", "Cholesky ε",
        "Insufficient GPU memory, skipping capacity metrics", "DDP reduction mode", "DDP Gram reduction",
        "Building Woodbury factors for", "Using eigendecomp for G", "K-FAC factor accumulation complete",
    ),
    "The flash-clipping fork of Opacus": (
        "Flash Clipping", "Bookkeeping mode", "2-pass mode", "stack norms", "local computation", "final computation",
        "all-reduce communication", "per-layer norm", "first/second backward", "pre/post all-reduce",
        "allocated, reserved, peak", "forward/backward/total", "O(T) vs O(T²)", "30 %", "Async All-Reduce",
        "Eager Activation Cleanup", "Adaptive Algorithm Selection", "Layer-by-Layer Processing", "rank-0 printing",
    ),
    "The ASNN-Goose notes": (
        "FP32", "FP16", "BF16", "TF32", "FP8", "TorchDynamo", "AOTAutograd", "TorchInductor", "AdamW", "DDP",
        "Cosine decay to 50%", "starvation", "overfit tiny subset", "gradient clipping freq", "dead neurons",
        "Teacher-Student corr", "resume verification", "learnable temperature", "collectors", "PPL", "Time", "v10", "v11.1",
        "v13", "has no gradient!", "NaN/Inf gradient in", "Loss spike detected! Rolling back...",
    ),
}  # fmt: skip
FIGURES = ("1.3–1.8 ×", "+33 %", "20–40 %", "2–5 ×")


def part(title: str) -> str:
    """Text of the page from a heading of the second level to the next one."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """Cells of the tables of three columns, without their headings."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [[*cells, ""] for cells in lines if cells[0] not in ("theirs", "figure") and not cells[0].startswith("---")]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@functools.cache
def package() -> str:
    return "\n".join(path.read_text() for path in Path(gramian.__file__).parent.rglob("*.py"))


@functools.cache
def flags(command: str) -> frozenset[str]:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"gramian.cli.{COMMANDS[command][0]}").add_arguments(parser)
    return frozenset(option for action in parser._actions for option in action.option_strings)


@functools.cache
def arguments() -> frozenset[str]:
    """Names of all arguments of the two classes, and of their methods that the page names."""
    kfac, engine = gramian.KFACNaturalGradient, gramian.PrivacyEngine
    called: list[Any] = [kfac, kfac.capture, kfac.compute_natural_gradient, engine.make_private]
    return frozenset(name for function in called for name in inspect.signature(function).parameters)


def exists(token: str, command: str = "") -> bool:
    """Whether something of ours that the page names exists; `command` is the last one that was named before it."""
    if run := re.fullmatch(r"(?:torchrun .*-m )?gramian (\w+)( \w+)?((?: --[\w-]+)*)", token):
        name, target, given = run[1], (run[2] or "").strip(), run[3].split()
        targets = {"verify": PROOFS, "profile": PROFILES}.get(name, {"": ""})
        return name in COMMANDS and target in targets and set(given) <= flags(name)
    if token.startswith("--"):
        return token in flags(command)
    if owner := re.fullmatch(r"(kfac|engine)\.(\w+)(\(\))?", token):
        subject: Any = gramian.KFACNaturalGradient() if owner[1] == "kfac" else gramian.PrivacyEngine()
        return hasattr(subject, owner[2])
    if token.startswith("gramian."):
        subject = gramian
        for name in token.split(".")[1:]:
            subject = getattr(subject, name, None)
        return subject is not None
    if key := re.fullmatch(r"(\w+)\.(\w+)( = .*)?", token):
        if key[1] in SECTIONS:
            return key[2] in {field.name for field in dataclasses.fields(SECTIONS[key[1]])}
        return key[1] == "time" and f'"{key[2]}"' in package()
    if given_option := re.fullmatch(r"([a-zA-Z_]+)=.*", token):
        return given_option[1] in arguments() or f'"{given_option[1]}"' in package()
    return re.search(rf"\b{re.escape(token)}\b", package()) is not None


@pytest.mark.parametrize("title", NAMES)
def test_every_name_of_the_notes_is_in_its_part_of_the_page(title: str) -> None:
    theirs = " ".join(cells[0] for cells in rows(part(title)))
    spans = code(theirs)
    missing = [name for name in NAMES[title].split() if not any(_names(span, name) for span in spans)]
    assert missing == [] and [words for words in IN_WORDS[title] if words not in theirs] == []


def _names(span: str, name: str) -> bool:
    """Whether a name stands in a span of code by itself, and not as a part of a longer one."""
    return re.search(rf"(?<![\w]){re.escape(name)}(?![\w])", span) is not None if name[-1] != "=" else name in span


@pytest.mark.parametrize("title", NAMES)
def test_what_the_page_calls_ours_exists(title: str) -> None:
    wrong, checked, command = [], 0, ""
    for cells in rows(part(title)):
        for token in code(re.sub(r"\[[^]]*\]\([^)]*\)", "", cells[1])):  # links are followed by tests/test_docs.py
            if run := re.search(r"gramian (\w+)", token):
                command = run[1]
            checked += 1
            if not exists(token, command):
                wrong.append(token)
    assert wrong == [] and checked > 20


def test_a_row_without_a_counterpart_says_why() -> None:
    for title in NAMES:
        assert [cells for cells in rows(part(title)) if cells[1].strip() == "–" and not cells[2].strip(" |")] == []


def test_old_flags_are_on_the_page() -> None:
    assert [flag for flag in OLD_FLAGS if f"`{flag}" not in PAGE] == []


def test_the_figures_of_the_notes_stand_beside_ours() -> None:
    table = part("Their performance figures, measured here")
    assert [figure for figure in FIGURES if figure not in table] == []


def test_a_name_that_does_not_exist_is_seen() -> None:
    invented = (
        "gramian nothing", "gramian verify nothing", "gramian verify kfac --nothing", "kfac.nothing()", "gramian.Nothing",
        "engine.nothing", "run.nothing", "time.no_such_field", "no_such_field", "no_such_option=3",
    )  # fmt: skip
    assert [token for token in invented if exists(token)] == []
    assert not _names("eigvals_clipped_cpu", "eigvals_clipped")
