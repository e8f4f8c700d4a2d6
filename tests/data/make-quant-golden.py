#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the libraries behind Transformers' quantised caches make of tensors, and what the cache layers return.

make-quant-golden.py tensors >quant-golden.txt
make-quant-golden.py layers >quantized-layer-golden.txt

Needs torch, transformers 5.24, optimum-quanto 0.2.7 and hqq 0.2.8; on the CPU.  Values are made by integer hashes, so that a test in C
makes the same ones (tests/lib/quant-values.c).

Lines of `tensors`:  codec nbits axis group dtype rows heads tokens width kind seed  packed scales offsets digest
    bytes in hexadecimal as they lie in memory; the digest is over the decoded values.  A tensor that the library refuses, when it is
    quantised or decoded, has `refused` and the name of the exception instead.
Lines of `layers`:   layer codec nbits axis_key axis_value group residual dtype rows heads width
                     update tokens seed  length residual digest_k digest_v  samples of k and v
                     reorder rows...
"""
import sys

import numpy as np
import torch

torch.set_num_threads(1)
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def hashes(seed, n):
    i = np.arange(n, dtype=np.uint64)
    x = (np.uint64(seed * 0x9E3779B1 & 0xFFFFFFFF) + i * np.uint64(0x85EBCA77)) & np.uint64(0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> np.uint64(shift)
        x = x * np.uint64(factor) & np.uint64(0xFFFFFFFF)
    return (x ^ (x >> np.uint64(16))).astype(np.int64)


def normal(seed, n):
    """Nearly Gaussian, at most 3.5 in size, the same in C: a sum of four 16-bit numbers."""
    sums = (hashes(seed, 4 * n) >> 16).reshape(n, 4).sum(axis=1) - 131070
    return sums.astype(np.float32) / np.float32(37837)


def values(kind, seed, shape, dtype):
    n, width = int(np.prod(shape)), shape[-1]
    v, i = normal(seed, n), np.arange(n)
    f = np.float32
    made = {
        "normal": lambda: v,
        "small": lambda: v * f(0.015625),
        "large": lambda: v * f(1024),
        "wide": lambda: v * f(16384),
        "tiny": lambda: v * f(2**-20),
        "outliers": lambda: np.where(i % width % 16 == 3, v * f(16), v),
        "offset": lambda: v * f(0.125) + f(50),
        "constant": lambda: normal(seed, n // width).repeat(width),
        "sparse": lambda: np.where(hashes(seed, n) % 8 == 0, f(1), f(0)),
        "ties": lambda: np.rint(v * f(4)) / f(8),
        "zero": lambda: v * f(0),
        "hostile": lambda: np.where(i == 5, f(np.nan), np.where(i == n - 3, f(np.inf), v)),
    }[kind]()
    return torch.from_numpy(np.ascontiguousarray(made.astype(np.float32)).reshape(shape)).to(DTYPES[dtype])


def raw(t):
    t = t.detach().contiguous()
    t = t.view(torch.int16) if t.dtype in (torch.float16, torch.bfloat16) else t
    t = t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t
    return t.numpy().tobytes()


def digest(t):
    """FNV-1a over the values as floats; zeros without sign, one NaN."""
    x = t.float().contiguous().numpy().reshape(-1).copy()
    x[x == 0] = 0
    bits = np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32)).astype("<u4").tobytes()
    h = 0xCBF29CE484222325
    for byte in bits:
        h = (h ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{h:016x}"


# ---- tensors ----------------------------------------------------------------------------------------------------------------------


def quanto(x, nbits, axis, group):
    from optimum.quanto import MaxOptimizer, qint2, qint4, quantize_weight
    qtype = qint4 if nbits == 4 else qint2
    scale, shift = MaxOptimizer()(x, qtype, axis, group)
    q = quantize_weight(x, qtype, axis, scale, shift, group)
    return raw(q._data._data), raw(scale), raw(shift), q.dequantize()


def hqq(x, nbits, axis, group):
    from hqq.core.quantize import Quantizer
    q, meta = Quantizer.quantize(x, axis=axis, device="cpu", compute_dtype=x.dtype, nbits=nbits, group_size=group)
    meta["compute_dtype"] = x.dtype
    Quantizer.cuda(q, meta=meta, device="cpu")
    decoded = Quantizer.dequantize(q, meta)
    return raw(q), raw(meta["scale"].to(x.dtype)), raw(meta["zero"].to(x.dtype)), decoded


def fp8(x, nbits, axis, group):
    from transformers.cache_utils import Fp8QuantizedLayer
    layer = Fp8QuantizedLayer()
    layer.update(x, x)
    codes, scale = layer._quantized_keys
    return raw(codes), raw(scale.reshape(1)), b"", layer._dequantize(layer._quantized_keys)


CODECS = {"quanto": quanto, "hqq": hqq, "fp8": fp8}


def tensor_line(codec, nbits, axis, group, dtype, shape, kind, seed):
    x = values(kind, seed, shape, dtype)
    head = f"{codec} {nbits} {axis} {group} {dtype} {' '.join(map(str, shape))} {kind} {seed}"
    try:
        packed, scales, offsets, decoded = CODECS[codec](x, nbits, axis, group)
        assert decoded.shape == x.shape and decoded.dtype == x.dtype
    except Exception as e:
        print(head, "refused", type(e).__name__)
        return
    print(head, packed.hex(), scales.hex(), offsets.hex() or "-", digest(decoded))


def tensors():
    seed = 1
    kinds = ["normal", "small", "large", "wide", "tiny", "outliers", "offset", "constant", "sparse", "ties", "zero", "hostile"]
    plain = (1, 2, 4, 16)
    for kind in kinds:  # every kind in every type
        for dtype in DTYPES:
            wide = kind == "wide" and dtype == "f16"
            for codec, nbits, axis in (("quanto", 4, 0), ("quanto", 2, -1), ("hqq", 4, 1), ("hqq", 2, 0), ("fp8", 8, 0)):
                seed += 1
                tensor_line(codec, nbits, axis, 8, dtype, (2, 1, 3, 16) if wide else plain, kind, seed)
    for dtype in DTYPES:  # every width of a code, both axes, shapes that do not come out even
        for nbits in (2, 4):
            for axis, group, shape in ((0, 16, (1, 1, 5, 16)), (0, 12, (1, 2, 3, 16)), (-1, 4, (2, 2, 3, 8)), (-1, 6, (1, 3, 2, 5)),
                                       (0, 32, (1, 1, 2, 16)), (0, 64, (3, 2, 2, 16)), (0, 24, (2, 1, 3, 8)), (-1, 1, (1, 2, 3, 4))):
                seed += 1
                tensor_line("quanto", nbits, axis, group, dtype, shape, "normal", seed)
        for nbits in (1, 2, 3, 4, 8):
            for axis, group, shape in ((0, 16, (1, 1, 4, 16)), (1, 16, (1, 2, 4, 16)), (0, 20, (1, 1, 5, 8)), (1, 64, (2, 2, 4, 32)),
                                       (0, 64, (1, 2, 4, 24)), (1, 12, (1, 2, 6, 16))):
                seed += 1
                tensor_line("hqq", nbits, axis, group, dtype, shape, "outliers" if seed % 2 else "normal", seed)
        tensor_line("fp8", 8, 0, 0, dtype, (2, 3, 5, 7), "outliers", seed)
    for nbits in (1, 2, 3, 4, 8):  # what does not fit is refused
        for axis in (0, 1):
            for n_tokens in (1, 2, 3, 8, 10):
                seed += 1
                tensor_line("hqq", nbits, axis, 16, "f32", (1, 1, n_tokens, 16), "normal", seed)
    for axis, group, shape in ((0, 64, (1, 2, 1, 16)), (0, 64, (1, 2, 3, 16)), (-1, 16, (1, 2, 3, 16)), (0, 96, (2, 1, 3, 16)),
                               (1, 24, (1, 1, 2, 16)), (-1, 8, (1, 2, 4, 1))):
        seed += 1
        tensor_line("hqq" if axis == 1 else "quanto", 4, axis, group, "f32", shape, "normal", seed)


# ---- layers -----------------------------------------------------------------------------------------------------------------------


def layer_run(codec, nbits, axis_key, axis_value, group, residual, dtype, rows, heads, width, steps):
    from transformers import LlamaConfig, QuantizedCache
    config = LlamaConfig(num_hidden_layers=1, hidden_size=heads * width, num_attention_heads=heads, num_key_value_heads=heads,
                         vocab_size=32, intermediate_size=32)
    options = {} if codec == "fp8" else dict(nbits=nbits, axis_key=axis_key, axis_value=axis_value, q_group_size=group,
                                             residual_length=residual)
    cache = QuantizedCache(codec, config, **options)
    print("layer", codec, nbits, axis_key, axis_value, group, residual, dtype, rows, heads, width)
    seed = 1000
    for step in steps:
        if isinstance(step, list):
            cache.reorder_cache(torch.tensor(step))
            print("reorder", *step)
            continue
        seed += 2
        k = values("outliers", seed, (rows, heads, step, width), dtype)
        v = values("normal", seed + 1, (rows, heads, step, width), dtype)
        rk, rv = cache.update(k, v, 0)
        layer = cache.layers[0]
        kept = layer.keys.shape[-2] if layer.keys.dim() == 4 else 0
        length, offset = layer.get_mask_sizes(1)
        assert rk.shape[-2] == cache.get_seq_length() and length == cache.get_seq_length() + 1 and offset == 0
        places = hashes(seed, 6) % rk.numel()
        samples = [float(t.reshape(-1)[int(p)]) for t in (rk, rv) for p in places]
        print("update", step, seed, cache.get_seq_length(), kept, digest(rk), digest(rv), *(f"{x:.9g}" for x in samples))


def layers():
    grown = [10] + [1] * 9
    for residual in (0, 1, 2, 3, 4):
        layer_run("quanto", 4, 0, 0, 16, residual, "f32", 1, 2, 16, grown)
    for steps in ([10, 1, 5, 1], [10, 2, 2, 1], [10, 3, 1, 1], [10, 1, 2, 1, 3, 1]):
        layer_run("quanto", 2, 0, 0, 16, 4, "f16", 1, 2, 16, steps)
    layer_run("quanto", 4, 0, 0, 16, 128, "bf16", 1, 1, 16, [10, 200, 1])
    layer_run("quanto", 4, -1, 0, 4, 4, "f32", 4, 2, 8, [3, 1, 1, 1, 1, 2, 3])
    layer_run("quanto", 2, -1, -1, 4, 2, "f16", 2, 2, 8, [4, 1, 1, [1, 0], 1, 1])
    beams = [4, 1, [1, 1, 0], [2, 0, 1], 1, [0, 0, 2], 1, 1, [2, 1, 0], 1, 1, 1]
    layer_run("quanto", 4, 0, 0, 16, 4, "f32", 3, 2, 16, beams)
    layer_run("quanto", 4, 0, 0, 16, 4, "bf16", 3, 2, 16, beams)
    layer_run("hqq", 4, 1, 1, 16, 4, "f32", 2, 2, 16, [4, 1, 1, 2, [1, 1], 2, 2, 2])
    layer_run("hqq", 4, 0, 0, 16, 4, "f32", 2, 2, 16, [4, 1, 1, 2, [1, 0], 2, 2, 2])
    layer_run("hqq", 2, 0, 1, 16, 2, "f32", 2, 2, 16, [4, 2, 2, 2])
    layer_run("hqq", 3, 0, 0, 16, 1, "f32", 2, 2, 16, [3, 1, 1, 1])
    layer_run("hqq", 8, 1, 1, 16, 4, "f32", 1, 2, 16, [5, 1, 3, 1])
    layer_run("hqq", 4, 1, 1, 16, 4, "f16", 2, 2, 16, [4, 1, 1, 2, [1, 1], 2, 2, 2])
    layer_run("hqq", 4, 1, 1, 16, 4, "bf16", 2, 2, 16, [4, 1, 1, 2, 2, 2])
    for dtype in DTYPES:
        layer_run("fp8", 8, 0, 0, 0, 0, dtype, 2, 2, 16, [3, 1, 2, [1, 0], 1, [1, 1], 5])


print(f"# Made by make-quant-golden.py {sys.argv[1]}")
{"tensors": tensors, "layers": layers}[sys.argv[1]]()
