"""The Hub folder: it carries its code and works where only torch and transformers are installed; adapters, merging.

What a user without the package does runs in two fresh processes, offline and with `d2f_hf` blocked; the tests look at
what they left.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import d2f_hf.modeling
import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

from tiny_models import FAMILIES, PAD, letter_tokenizer, tiny_model

SOURCE = Path(d2f_hf.modeling.__file__).parent
CLASS_NAMES = {family: model_class.__name__ for family, (_, model_class, _) in FAMILIES.items()}
TARGETS = {family: ["q_proj", "attn_out" if family == "llada" else "o_proj", "up_proj"] for family in FAMILIES}
PROMPT = "hello there"
all_families = pytest.mark.parametrize("family", FAMILIES)


def code_files(family: str) -> set[str]:
    """All of the code, except what is particular to another family."""
    suffixes = tuple(f"_{other}.py" for other in FAMILIES if other != family)
    others = {"__init__.py", "decoder_layer.py"} if family == "llada" else {"__init__.py"}
    return {path.name for path in SOURCE.glob("*.py") if not path.name.endswith(suffixes)} - others


PREAMBLE = """
import json
import sys
from pathlib import Path

sys.modules["d2f_hf"] = None  # `import d2f_hf` fails
try:
    import d2f_hf
except ImportError:
    pass
else:
    raise SystemExit("d2f_hf is importable, so this proves nothing")

import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

top, prompt, class_names, targets = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])


def load(path, auto_class=AutoModelForCausalLM):
    return auto_class.from_pretrained(path, trust_remote_code=True).eval()


@torch.no_grad()
def outcome(model, name):
    inputs = AutoTokenizer.from_pretrained(root / "saved", trust_remote_code=True)(prompt, return_tensors="pt")
    ids = inputs["input_ids"]
    logits = model(input_ids=ids, prompt_lengths=torch.tensor([3]), block_size=4).logits
    tokens = model.generate(**inputs, max_new_tokens=10)
    vanilla = model.generate(**inputs, max_new_tokens=10, decoding="vanilla")
    return {f"{name}.logits": logits, f"{name}.tokens": tokens, f"{name}.vanilla": vanilla}
"""

FIRST = (
    PREAMBLE
    + """
for family, class_name in class_names.items():
    root = top / family
    model = load(root / "saved")
    assert type(load(root / "saved", AutoModel)) is type(model) and type(model).__name__ == class_name
    assert type(model).__module__.startswith("transformers_modules.")
    assert type(model.generation_config).__name__ == "D2FGenerationConfig"
    assert model.generation_config.confidence_threshold == 0.55
    results = outcome(model, "saved") | outcome(load(root / "saved", AutoModel), "saved_auto_model")

    model.train()
    ids = torch.arange(12)[None]
    loss = model(ids, labels=ids).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    results["loss"] = loss.detach()
    model.eval().save_pretrained(root / "trained")
    results |= outcome(model, "trained")

    class Mine(type(model)):  # in __main__, whose code cannot be saved
        pass

    mine = Mine(model.config).eval()
    mine.load_state_dict(model.state_dict())
    mine.generation_config = model.generation_config
    mine.save_pretrained(root / "derived")
    results |= outcome(mine, "derived")

    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=0, world_size=1)
    sharded = fully_shard(load(root / "saved"), mesh=init_device_mesh("cpu", (1,)))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    sharded.save_pretrained(root / "sharded", state_dict=get_model_state_dict(sharded, options=options))
    dist.destroy_process_group()

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=targets[family], init_lora_weights=False, task_type="CAUSAL_LM")
    lora = get_peft_model(load(root / "saved"), config)
    lora.eval()
    lora.save_pretrained(root / "adapter")
    results |= outcome(lora, "adapter")
    merged = lora.merge_and_unload()
    merged.save_pretrained(root / "merged")
    results |= outcome(merged, "merged")
    save_file({name: value.contiguous() for name, value in results.items()}, root / "first.safetensors")
"""
)

SECOND = (
    PREAMBLE
    + """
for family in class_names:
    root = top / family
    results = outcome(load(root / "trained"), "trained") | outcome(load(root / "merged"), "merged")
    results |= outcome(load(root / "derived"), "derived") | outcome(load(root / "sharded"), "sharded")
    adapter = AutoPeftModelForCausalLM.from_pretrained(root / "adapter", trust_remote_code=True).eval()
    results |= outcome(adapter, "adapter")
    load(root / "trained").save_pretrained(root / "trained_again")
    save_file({name: value.contiguous() for name, value in results.items()}, root / "second.safetensors")
"""
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """`saved` of each family, made here, and what the two processes make of it."""
    root = tmp_path_factory.mktemp("hub")
    for family in FAMILIES:
        model = tiny_model(family=family)
        model.generation_config.confidence_threshold = 0.55
        model.save_pretrained(root / family / "saved")
        letter_tokenizer().save_pretrained(root / family / "saved")
    blocked = {"PYTHONPATH", "HF_HOME", "HF_HUB_CACHE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE"}
    environment = {name: value for name, value in os.environ.items() if name not in blocked}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(root / "home"), "PYTHONWARNINGS": "ignore"}
    for script in (FIRST, SECOND):
        command = [sys.executable, "-c", script, str(root), *map(json.dumps, (PROMPT, CLASS_NAMES, TARGETS))]
        # In its own empty folder, so that nothing of the checkout is importable by accident.
        (root / "elsewhere").mkdir(exist_ok=True)
        done = subprocess.run(command, cwd=root / "elsewhere", env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return root


@pytest.fixture
def folder(folders, family) -> Path:
    return folders / family


def outcome(model, name: str) -> dict[str, torch.Tensor]:
    """What the processes record, by a model here."""
    inputs = letter_tokenizer()(PROMPT, return_tensors="pt")
    with torch.no_grad():
        logits = model(input_ids=inputs["input_ids"], prompt_lengths=torch.tensor([3]), block_size=4).logits
    tokens = model.generate(**inputs, max_new_tokens=10)
    vanilla = model.generate(**inputs, max_new_tokens=10, decoding="vanilla")
    return {f"{name}.logits": logits, f"{name}.tokens": tokens, f"{name}.vanilla": vanilla}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], names, tolerance: float = 0.0):
    for name in names:
        for kind in ("logits", "tokens", "vanilla"):
            a, b = actual[f"{name}.{kind}"], expected[f"{name}.{kind}"]
            torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, msg=f"{name}.{kind} differs")


@all_families
@pytest.mark.parametrize("name", ["saved", "trained", "trained_again", "merged", "derived", "sharded"])
def test_a_saved_folder_holds_weights_configs_and_exactly_the_code(folder, family, name):
    """`trained` and `merged` were saved by models loaded from a folder, `trained_again` by one loaded from that."""
    path = folder / name
    assert {file.name for file in path.glob("*.py")} == code_files(family)
    for file in code_files(family):
        assert (path / file).read_text() == (SOURCE / file).read_text()
    assert (path / "model.safetensors").exists()
    config = json.loads((path / "config.json").read_text())
    class_name = CLASS_NAMES[family]
    assert config["auto_map"] == {
        "AutoConfig": f"configuration_d2f_{family}." + class_name.replace("ForBlockDiffusion", "Config"),
        "AutoModel": f"modeling_d2f_{family}.{class_name}",
        "AutoModelForCausalLM": f"modeling_d2f_{family}.{class_name}",
    }
    assert config["architectures"] == [class_name]
    generation_config = json.loads((path / "generation_config.json").read_text())
    assert generation_config["decoding"] == "d2f"
    assert generation_config["confidence_threshold"] == 0.55


def test_the_code_of_a_family_is_all_but_that_of_the_other():
    assert {"block_causal.py", "cache_d2f.py", "configuration_d2f.py", "modeling_d2f.py"} <= code_files("llada")
    for family in FAMILIES:
        own = code_files(family) - set().union(*(code_files(other) for other in FAMILIES if other != family))
        assert own == {f"configuration_d2f_{family}.py", f"modeling_d2f_{family}.py"}


@all_families
def test_without_the_package_logits_and_tokens_are_the_same(folder):
    first = load_file(folder / "first.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder / "saved").eval()
    assert type(model).__module__.startswith("d2f_hf.")
    here = outcome(model, "saved")
    assert_same(first, here, ["saved"])
    assert_same(
        {k.replace("saved_auto_model", "saved"): v for k, v in first.items() if "auto_model" in k}, here, ["saved"]
    )


@all_families
def test_a_training_step_survives_saving_and_another_process(folder):
    first, second = load_file(folder / "first.safetensors"), load_file(folder / "second.safetensors")
    assert first["loss"].isfinite() and not first["trained.logits"].equal(first["saved.logits"])
    assert_same(second, first, ["trained"])
    here = AutoModelForCausalLM.from_pretrained(folder / "trained").eval()
    assert_same(outcome(here, "trained"), first, ["trained"])


@all_families
def test_what_wraps_a_model_that_came_from_a_folder_is_not_in_the_next_folder(folder):
    """A class derived in `__main__`, whose code was not saved at all, and one that FSDP2 made."""
    first, second = load_file(folder / "first.safetensors"), load_file(folder / "second.safetensors")
    assert_same(second, first, ["derived"])
    assert_same({k.replace("sharded", "saved"): v for k, v in second.items() if "sharded" in k}, first, ["saved"])


@all_families
def test_an_adapter_and_its_merged_model_survive_saving_and_another_process(folder):
    first, second = load_file(folder / "first.safetensors"), load_file(folder / "second.safetensors")
    assert not torch.allclose(first["adapter.logits"], first["saved.logits"], atol=0.1), (
        "an adapter that does something"
    )
    assert_same(second, first, ["adapter", "merged"])
    assert_same({k.replace("merged", "adapter"): v for k, v in first.items()}, first, ["adapter"], tolerance=1e-4)


# ---- adapters, here ----


@all_families
@pytest.mark.parametrize("task_type", [None, "CAUSAL_LM"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_adapter_generates_merges_saves_and_reloads(family, task_type, tied, tmp_path):
    tiny_model(family=family, tie_word_embeddings=tied).save_pretrained(tmp_path / "base")

    def base():
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=TARGETS[family], init_lora_weights=False, task_type=task_type)
    lora = get_peft_model(base(), config).eval()
    expected = outcome(lora, "x")
    assert not torch.allclose(expected["x.logits"], outcome(base(), "x")["x.logits"], atol=0.1)
    ids = letter_tokenizer()(PROMPT, return_tensors="pt")["input_ids"]
    for way in ({"input_ids": ids}, {"inputs": ids}):
        if task_type is None or "input_ids" in way:
            tokens = lora.generate(**way, decoding="d2f", max_new_tokens=10)
            assert tokens.equal(expected["x.tokens"])
    with pytest.raises(ValueError, match="confidence_treshold"):
        lora.generate(input_ids=ids, confidence_treshold=0.5)

    lora.save_pretrained(tmp_path / "adapter")
    assert_same(outcome(PeftModel.from_pretrained(base(), tmp_path / "adapter").eval(), "x"), expected, ["x"])
    if task_type is not None:
        assert_same(
            outcome(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval(), "x"), expected, ["x"]
        )
    with lora.disable_adapter():
        assert outcome(lora, "x")["x.logits"].equal(outcome(base(), "x")["x.logits"])

    merged = lora.merge_and_unload()
    assert type(merged) is FAMILIES[family][1]
    merged_outcome = outcome(merged, "x")
    assert_same(merged_outcome, expected, ["x"], tolerance=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    for auto_class in (AutoModelForCausalLM, AutoModel):
        assert_same(outcome(auto_class.from_pretrained(tmp_path / "merged").eval(), "x"), merged_outcome, ["x"])


@all_families
def test_merging_in_bfloat16_stays_close(family):
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=TARGETS[family], init_lora_weights=False)
    lora = get_peft_model(tiny_model(family=family).to(torch.bfloat16), config).eval()
    ids = torch.randint(0, PAD, (1, 8))
    with torch.no_grad():
        before = lora(input_ids=ids).logits
        after = lora.merge_and_unload()(input_ids=ids).logits
    assert after.dtype == torch.bfloat16
    assert (after - before).abs().max() < 0.05 * before.abs().max()
