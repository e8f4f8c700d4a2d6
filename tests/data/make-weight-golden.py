# SPDX-License-Identifier: Apache-2.0
# Writes weight-golden.h: random blocks of each weight type and their values as the `gguf` Python package (an independent
# implementation) decodes them.  Usage: python3 make-weight-golden.py > weight-golden.h
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from gguf.quants import dequantize

rng = np.random.default_rng(20260101)
TYPES = [T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q4_K, T.Q5_K, T.Q6_K]
# Where the binary16 fields of a block lie.
HALVES = {T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208]}


def halves(n):
    """Ordinary, negative, subnormal, zero, largest."""
    odd = np.array([6.1e-5, -3e-6, 6e-8, 0.0, 65504.0], dtype=np.float16)
    values = rng.normal(0, 0.01, n).astype(np.float16)
    return np.where(rng.random(n) < 0.3, rng.choice(odd, n), values).astype(np.float16)


def blocks_of(kind):
    elements, size = GGML_QUANT_SIZES[kind]
    if kind == T.F32:
        return np.array([0, -0.0, 1, -1.5, 1e-45, 3.4e38, np.pi, 1e-20], dtype=np.float32).view(np.uint8)
    if kind in (T.F16, T.BF16):
        return np.array([0, 0x8000, 1, 0x83FF, 0x3C00, 0x7BFF, 0x1234, 0xBEEF], dtype=np.uint16).view(np.uint8)
    n = 4 if elements == 32 else 2
    blocks = rng.integers(0, 256, (n, size), dtype=np.uint8)
    for offset in HALVES[kind]:
        blocks[:, offset:offset + 2] = halves(n).view(np.uint8).reshape(n, 2)
    return blocks.reshape(-1)


def array(type_, name, values, per_line, form):
    print(f"static const {type_} {name}[] = {{")
    for i in range(0, len(values), per_line):
        print("    " + " ".join(form.format(v) + "," for v in values[i:i + per_line]))
    print("};")


print("/* SPDX-License-Identifier: Apache-2.0 */")
print("/* Made by make-weight-golden.py: blocks, and the bits of their values in float. */\n")
print("#include <stddef.h>\n#include <stdint.h>\n")
rows = []
for kind in TYPES:
    data = blocks_of(kind)
    values = dequantize(data.reshape(1, -1), kind).reshape(-1).astype(np.float32)
    name = kind.name.lower()
    array("uint8_t", f"blocks_{name}", data, 20, "0x{:02x}")
    array("uint32_t", f"values_{name}", values.view(np.uint32), 10, "0x{:08x}")
    rows.append(f'    {{"{kind.name}", {int(kind)}, blocks_{name}, values_{name}, {len(values)}}},')
print("\nstatic const struct WeightGolden {")
print("    const char *name;\n    uint32_t type;\n    const uint8_t *blocks;\n    const uint32_t *values;\n    size_t n;")
print("} weight_golden[] = {")
print("\n".join(rows))
print("};")
