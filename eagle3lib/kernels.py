"""Triton kernels of the training step. Imported on a GPU only."""
# mypy: disable-error-code=no-untyped-def

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows(logits, target, live, each, guess, slope, D, K, DISTANCE: tl.constexpr, BLOCK: tl.constexpr):
    """One row of distances.row_gradients: row r of `logits` against row r // K of `target`."""
    r = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    z_row, t_row, out_row = logits + r * D, target + (r // K) * D, slope + r * D
    if tl.load(live + r) == 0:
        tl.store(each + r, 0.0)
        tl.store(guess + r, 0)
        for start in range(0, D, BLOCK):
            tl.store(out_row + start + lanes, tl.zeros([BLOCK], tl.float32).to(slope.dtype.element_ty), mask=start + lanes < D)
        return
    # Softmax denominators and the greedy id; a lane that never sees a column keeps -1e30 and so adds nothing.
    z_max, t_max = tl.full([BLOCK], -1e30, tl.float32), tl.full([BLOCK], -1e30, tl.float32)
    z_sum, t_sum, best = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, D, BLOCK):
        column = start + lanes
        z = tl.load(z_row + column, mask=column < D, other=-1e30).to(tl.float32)
        t = tl.load(t_row + column, mask=column < D, other=-1e30).to(tl.float32)
        best = tl.where(z > z_max, column, best)
        top = tl.maximum(z_max, z)
        z_sum = z_sum * tl.exp(z_max - top) + tl.exp(z - top)
        z_max = top
        top = tl.maximum(t_max, t)
        t_sum = t_sum * tl.exp(t_max - top) + tl.exp(t - top)
        t_max = top
    z_top, t_top = tl.max(z_max, 0), tl.max(t_max, 0)
    z_lse = z_top + tl.log(tl.sum(z_sum * tl.exp(z_max - z_top), 0))
    t_lse = t_top + tl.log(tl.sum(t_sum * tl.exp(t_max - t_top), 0))
    tl.store(guess + r, tl.min(tl.where(z_max == z_top, best, D), 0).to(tl.int64))
    a, b = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    if DISTANCE == 2:
        for start in range(0, D, BLOCK):
            column = start + lanes
            q = tl.exp(tl.load(z_row + column, mask=column < D, other=-1e30).to(tl.float32) - z_lse)
            p = tl.exp(tl.load(t_row + column, mask=column < D, other=-1e30).to(tl.float32) - t_lse)
            a += tl.minimum(p, q)
            b += tl.where(q < p, q, 0.0)
        # Below 1e-37 float32 has no reciprocal: a distance is at most 85.2, and its gradient, still finite, fades beyond that.
        rate, share = tl.maximum(tl.sum(a, 0), 1e-37), tl.sum(b, 0)
        tl.store(each + r, -tl.log(rate))
        for start in range(0, D, BLOCK):
            column = start + lanes
            q = tl.exp(tl.load(z_row + column, mask=column < D, other=-1e30).to(tl.float32) - z_lse)
            p = tl.exp(tl.load(t_row + column, mask=column < D, other=-1e30).to(tl.float32) - t_lse)
            grad = q * (share - tl.where(q < p, 1.0, 0.0)) / rate
            tl.store(out_row + column, grad.to(slope.dtype.element_ty), mask=column < D)
    else:
        for start in range(0, D, BLOCK):
            column = start + lanes
            z = tl.load(z_row + column, mask=column < D, other=-1e30).to(tl.float32)
            t = tl.load(t_row + column, mask=column < D, other=-1e30).to(tl.float32)
            p = tl.exp(t - t_lse)
            a += tl.where(column < D, p * (z - z_lse), 0.0)
            b += tl.where(column < D, p * (t - t_lse), 0.0)
            tl.store(out_row + column, (tl.exp(z - z_lse) - p).to(slope.dtype.element_ty), mask=column < D)
        distance = -tl.sum(a, 0)
        if DISTANCE == 1:
            distance += tl.sum(b, 0)
        tl.store(each + r, distance)


@triton.jit
def join(flash, flash_lse, slot, q, own_k, own_v, out, lse, scale, L, OWN: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
         C: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr):
    """flash.FlashAttend, forward: one position's query heads of one key head. The own keys join the kernel's softmax over true keys."""
    m, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, lane = tl.arange(0, HEADS), tl.arange(0, LANES)
    real, cols = head < GROUP, lane < C
    tile = real[:, None] & cols[None, :]
    at = tl.load(slot + m)
    heads = g * GROUP + head
    place = (m * G * GROUP + heads)[:, None] * C + lane[None, :]
    top = tl.load(flash_lse + heads * L + at, mask=real, other=0.0)
    total = tl.full([HEADS], 1.0, tl.float32)
    acc = tl.load(flash + (at * G * GROUP + heads)[:, None] * C + lane[None, :], mask=tile, other=0.0).to(tl.float32)
    query = tl.load(q + place, mask=tile, other=0.0).to(tl.float32)
    for n in tl.static_range(OWN):
        key_place = ((m * OWN + n) * G + g) * C + lane
        key = tl.load(own_k + key_place, mask=cols, other=0.0).to(tl.float32)
        value = tl.load(own_v + key_place, mask=cols, other=0.0).to(tl.float32)
        score = tl.sum(query * key[None, :], 1) * scale
        peak = tl.maximum(top, score)
        before, now = tl.exp(top - peak), tl.exp(score - peak)
        acc, total, top = acc * before[:, None] + value[None, :] * now[:, None], total * before + now, peak
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=tile)
    tl.store(lse + m * G * GROUP + heads, top + tl.log(total), mask=real)


@triton.jit
def own_backward(flash_dq, slot, q, own_k, own_v, out, lse, grad, dq, dk, dv, scale, OWN: tl.constexpr, G: tl.constexpr,
                 GROUP: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr):
    """flash.FlashAttend, backward: gradients through the own keys, added to what the flash kernel found for the queries."""
    m, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, lane = tl.arange(0, HEADS), tl.arange(0, LANES)
    real, cols = head < GROUP, lane < C
    tile = real[:, None] & cols[None, :]
    at = tl.load(slot + m)
    heads = g * GROUP + head
    place = (m * G * GROUP + heads)[:, None] * C + lane[None, :]
    query = tl.load(q + place, mask=tile, other=0.0).to(tl.float32)
    slope = tl.load(grad + place, mask=tile, other=0.0).to(tl.float32)
    mean = tl.sum(slope * tl.load(out + place, mask=tile, other=0.0).to(tl.float32), 1)
    joint = tl.load(lse + m * G * GROUP + heads, mask=real, other=0.0)
    acc = tl.load(flash_dq + (at * G * GROUP + heads)[:, None] * C + lane[None, :], mask=tile, other=0.0).to(tl.float32)
    for n in tl.static_range(OWN):
        key_place = ((m * OWN + n) * G + g) * C + lane
        key = tl.load(own_k + key_place, mask=cols, other=0.0).to(tl.float32)
        value = tl.load(own_v + key_place, mask=cols, other=0.0).to(tl.float32)
        weight = tl.where(real, tl.exp(tl.sum(query * key[None, :], 1) * scale - joint), 0.0)
        pull = weight * (tl.sum(slope * value[None, :], 1) - mean) * scale
        acc += pull[:, None] * key[None, :]
        tl.store(dk + key_place, tl.sum(pull[:, None] * query, 0).to(dk.dtype.element_ty), mask=cols)
        tl.store(dv + key_place, tl.sum(weight[:, None] * slope, 0).to(dv.dtype.element_ty), mask=cols)
    tl.store(dq + place, acc.to(dq.dtype.element_ty), mask=tile)


@triton.jit
def rotary(x, cos, sin, out, sign, HEADS: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """One row's heads [HEADS, C] turned by cos, sin float32 [C]; sign -1 turns back. Halves are paired, as in Llama."""
    r = tl.program_id(0).to(tl.int64)
    head, lane = tl.arange(0, ROWS), tl.arange(0, LANES)
    tile = (head < HEADS)[:, None] & (lane < C // 2)[None, :]
    place = (r * HEADS + head)[:, None] * C + lane[None, :]
    c = tl.load(cos + r * C + lane, mask=lane < C // 2, other=0.0)[None, :]
    s = tl.load(sin + r * C + lane, mask=lane < C // 2, other=0.0)[None, :] * sign
    a = tl.load(x + place, mask=tile, other=0.0).to(tl.float32)
    b = tl.load(x + place + C // 2, mask=tile, other=0.0).to(tl.float32)
    tl.store(out + place, (a * c - b * s).to(out.dtype.element_ty), mask=tile)
    tl.store(out + place + C // 2, (b * c + a * s).to(out.dtype.element_ty), mask=tile)


@triton.jit
def swiglu(gate, up, out, count, BLOCK: tl.constexpr):
    """out = silu(gate) * up"""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, b = (tl.load(gate + i, mask=i < count).to(tl.float32), tl.load(up + i, mask=i < count).to(tl.float32))
    tl.store(out + i, (a * tl.sigmoid(a) * b).to(out.dtype.element_ty), mask=i < count)


@triton.jit
def swiglu_backward(gate, up, grad, d_gate, d_up, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, b = (tl.load(gate + i, mask=i < count).to(tl.float32), tl.load(up + i, mask=i < count).to(tl.float32))
    g = tl.load(grad + i, mask=i < count).to(tl.float32)
    s = tl.sigmoid(a)
    tl.store(d_gate + i, (g * b * s * (1.0 + a * (1.0 - s))).to(d_gate.dtype.element_ty), mask=i < count)
    tl.store(d_up + i, (g * a * s).to(d_up.dtype.element_ty), mask=i < count)
