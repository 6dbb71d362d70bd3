"""Drafts and training states on disk: whole or not there, refused when they do not fit, loaded without pickle."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from drafts import HIDDEN, VOCAB, small_draft
from safetensors.torch import load_file, save_file

from eagle3lib import checkpoint
from eagle3lib.errors import Eagle3Error


def stepped(seed=0, steps=1):
    """A draft and its optimizer after some steps with made-up gradients."""
    draft = small_draft(seed=seed)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-2, fused=True)
    for n in range(steps):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.full_like(p, 0.1 * (n + 1))
        optimizer.step()
    return draft, optimizer


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.exported().values(), b.exported().values(), strict=True))


def test_a_draft_comes_back_bit_for_bit_with_its_facts(tmp_path):
    draft = small_draft()
    checkpoint.save(tmp_path, draft, {"target": "somewhere", "step": 3})
    loaded = checkpoint.load(tmp_path, embeddings=draft.embed_tokens.weight)
    assert same(draft, loaded) and loaded.cfg == draft.cfg and not loaded.training
    assert torch.equal(loaded.embed_tokens.weight, draft.embed_tokens.weight)
    assert checkpoint.about(tmp_path) == {"target": "somewhere", "step": 3}
    assert "embed_tokens.weight" not in load_file(tmp_path / "draft.safetensors")


def test_saving_again_replaces_and_leaves_nothing_else(tmp_path):
    for seed in (1, 2):
        checkpoint.save(tmp_path, small_draft(seed=seed), {})
    assert [p.name for p in tmp_path.iterdir()] == ["draft.safetensors"]
    assert same(checkpoint.load(tmp_path, embeddings=torch.zeros(VOCAB, HIDDEN)), small_draft(seed=2))


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(Eagle3Error, match="04_train"):
        checkpoint.load(tmp_path, embeddings=torch.zeros(VOCAB, HIDDEN))
    checkpoint.save(tmp_path, small_draft(), {})
    with pytest.raises(Eagle3Error, match="the target has"):
        checkpoint.load(tmp_path, embeddings=torch.zeros(VOCAB + 1, HIDDEN))


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_a_tensor_too_few_too_many_or_misshapen_is_named(tmp_path, change):
    draft = small_draft()
    checkpoint.save(tmp_path, draft, {})
    tensors = load_file(tmp_path / "draft.safetensors")
    if change == "missing":
        del tensors["fc.weight"]
    elif change == "unknown":
        tensors["fc.weight_scale"] = torch.ones(1)
    else:
        tensors["fc.weight"] = tensors["fc.weight"][:, 1:].contiguous()
    header = {"config": json.dumps(draft.cfg.to_dict()), "about": "{}"}
    save_file(tensors, tmp_path / "draft.safetensors", metadata=header)
    with pytest.raises(Eagle3Error, match="fc.weight"):
        checkpoint.load(tmp_path, embeddings=draft.embed_tokens.weight)


def test_a_damaged_draft_is_named(tmp_path):
    (tmp_path / "draft.safetensors").write_bytes(b"\x10" * 100)
    with pytest.raises(Eagle3Error, match=r"draft.safetensors is damaged"):
        checkpoint.load(tmp_path, embeddings=torch.zeros(VOCAB, HIDDEN))


def test_a_state_brings_back_weights_and_moments(tmp_path):
    draft, optimizer = stepped(steps=3)
    checkpoint.save_state(tmp_path, draft, optimizer, {"step": 3})
    path, state = checkpoint.last_state(tmp_path)
    other, fresh = stepped(seed=5)
    checkpoint.load_state(path, other, fresh)
    assert state["step"] == 3 and same(draft, other)
    for one, two in ((draft, optimizer), (other, fresh)):
        for p in two.param_groups[0]["params"]:
            p.grad = torch.full_like(p, -0.3)
        two.step()
        assert one is not None
    assert same(draft, other)


@pytest.mark.parametrize("ways", [{"fused": True, "capturable": True}, {"fused": True}, {"foreach": True, "capturable": True}, {"foreach": True}, {}])
def test_a_state_of_another_device_does_not_change_how_the_optimizer_computes(tmp_path, ways):
    """A GPU's optimizer is captured in a graph, a CPU's is not; either goes on from the other's state."""
    draft, optimizer = stepped(steps=3)
    path = checkpoint.save_state(tmp_path, draft, optimizer, {"step": 3})
    other = small_draft(seed=5)
    fresh = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=1e-2, **ways)
    before = {n: fresh.param_groups[0][n] for n in ("fused", "foreach", "capturable")}
    checkpoint.load_state(path, other, fresh)
    assert {n: fresh.param_groups[0][n] for n in before} == before and same(draft, other)
    moments = [[s["exp_avg"] for s in o.state.values()] for o in (optimizer, fresh)]
    assert all(torch.equal(a, b) for a, b in zip(*moments, strict=True)) and all(s["step"] == 3 for s in fresh.state.values())


def test_states_rotate(tmp_path):
    draft, optimizer = stepped()
    for step in (9, 10, 11, 100):
        checkpoint.save_state(tmp_path, draft, optimizer, {"step": step})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000011", "step-00000100"]


def test_no_more_is_kept_than_was_said_before_the_first_step(tmp_path, monkeypatch):
    draft, optimizer = stepped()
    trained = sum(4 * p.numel() for p in draft.parameters() if p.requires_grad)
    for step in range(1, 5):
        checkpoint.save_state(tmp_path, draft, optimizer, {"step": step})
    assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) < 3 * 3 * trained + 2 * trained
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5 * trained))
    checkpoint.require_room(tmp_path, draft)  # most of it is there already
    with pytest.raises(Eagle3Error, match="states in .*GB are free there. Make room first"):
        checkpoint.require_room(tmp_path / "not" / "yet", draft)


@pytest.mark.parametrize("file", ["draft.safetensors", "optimizer.pt", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_torn_state_is_passed_over(tmp_path, capsys, file, damage):
    draft, optimizer = stepped()
    for step in (1, 2):
        checkpoint.save_state(tmp_path, draft, optimizer, {"step": step})
    victim = tmp_path / "step-00000002" / file
    data = bytearray(victim.read_bytes())
    if damage == "gone":
        victim.unlink()
    elif damage == "cut":
        victim.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 255
        victim.write_bytes(data)
    path, state = checkpoint.last_state(tmp_path)
    assert (path.name, state["step"]) == ("step-00000001", 1)
    assert "step-00000002: not whole" in capsys.readouterr().out


def test_without_a_whole_state_there_is_none(tmp_path):
    assert checkpoint.last_state(tmp_path / "never") is None
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / ".step-00000002.tmp").mkdir()
    assert checkpoint.last_state(tmp_path) is None


def test_a_full_disk_is_said_and_the_old_draft_stays(tmp_path, monkeypatch):
    draft = small_draft(seed=1)
    checkpoint.save(tmp_path, draft, {})

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(Eagle3Error, match="cannot write .*No space.*GB are free"):
        checkpoint.save(tmp_path, small_draft(seed=2), {})
    assert same(checkpoint.load(tmp_path, embeddings=draft.embed_tokens.weight), draft)
    assert [p.name for p in tmp_path.iterdir()] == ["draft.safetensors"]


def test_optimizer_files_hold_nothing_but_tensors(tmp_path):
    checkpoint.save_state(tmp_path, *stepped(), {"step": 1})
    torch.load(tmp_path / "step-00000001" / "optimizer.pt", weights_only=True)
