"""C from a program: one function that encodes a gradient, pass after pass, and one that decodes.

Each pass goes through the gradient in tiles that stay in the first cache. In a tile, statistics of a block are found first,
then one loop has everything that is left, which a compiler vectorises.
"""

from __future__ import annotations

from importlib.resources import files

from meshwright.compress.c_decoder import Decoder
from meshwright.compress.c_encoder import Encoder
from meshwright.compress.program import Program

_ENTRIES = """
void encode(const NUMBER *flat, float *res, uint8_t *msg, const int64_t *table, int64_t many, uint32_t seed, float *agreed,
            int mode) {
    for (int64_t s = 0; s < many; s++) {
        const int64_t n = table[3 * s], start = table[3 * s + 1], place = table[3 * s + 2];
        if (res) encode_one(flat + start, res + start, msg + place, n, seed, agreed + s, mode, 1);
        else encode_one(flat + start, 0, msg + place, n, seed, agreed + s, mode, 0);
    }
}
void decode(const uint8_t *msg, NUMBER *out, const int64_t *table, int64_t many, const float *agreed, int add) {
    for (int64_t s = 0; s < many; s++) {
        const int64_t n = table[3 * s], start = table[3 * s + 1], place = table[3 * s + 2];
        if (add) decode_one(msg + place, out + start, n, agreed + s, 1);
        else decode_one(msg + place, out + start, n, agreed + s, 0);
    }
}
"""


def c_source(program: Program, number: str) -> str:
    """The whole file; `number` is the type of gradients: f32, f16 or bf16."""
    head = [
        f"#define NUMBER {'float' if number == 'f32' else 'uint16_t'}",
        f"#define FROM(x) from_{number}(x)",
        f"#define TO(x) to_{number}(x)",
        files("meshwright.compress").joinpath("native.h").read_text(),
    ]
    return "\n".join([*head, Encoder(program).text(), Decoder(program).text(), _ENTRIES]) + "\n"
