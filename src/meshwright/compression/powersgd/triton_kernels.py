"""PowerSGD's passes over all matrices of a buffer as Triton text: one launch for each, however many matrices there are.

They are text because every column of the thin factors has an accumulator of its own: three-dimensional tensors would be
moved between threads. A matrix is read once, four numbers of a row at a time; thin factors come from the cache. Loops
count iterations: the compiler knows a multiple of a constant to be aligned.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import indent

WIDE = 512  # columns that a program of the first and last product reads at once
SPREAD, SPREAD_AT_ONCE = 32, 4  # rows that a program of the last one writes, and how many at once
LANES = 256  # columns per program of the second product
CHUNK, AT_ONCE = 128, 16  # rows summed per partial sum, and how many at once
JOINED = 8  # partial sums added at once
# Fields of a matrix: begin, rows, columns, begin of P, begin of Q, rank, first counter, first sum, chunks of rows.
FACTS = 9
MOST = 8  # the largest rank that registers suffice for
COLUMN = 4096  # numbers of P's columns that a program reads at once
SAME = 1e-10  # share of a column's square outside the span of those before it; less is rounding

_FACTS = f"""
facts = matrices + matrix * {FACTS}
at = tl.multiple_of(tl.load(facts), ALIGNED)
rows, columns = tl.load(facts + 1).to(tl.int32), tl.multiple_of(tl.load(facts + 2).to(tl.int32), ALIGNED)
left, right = p + tl.load(facts + 3), q + tl.multiple_of(tl.load(facts + 4), ALIGNED)
rank = tl.load(facts + 5).to(tl.int32)
"""
# The rows and columns of a program, and their matrix.
_TILE = f"""
matrix, chunk, block = tl.load(row).to(tl.int32), tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32)
columns = tl.load(matrices + matrix * {FACTS} + 2).to(tl.int32)
"""


@dataclass(frozen=True)
class Thin:
    """Width of the thin factors, a power of two; matrices may have a smaller rank."""

    rank: int

    @property
    def rows(self) -> int:
        """Rows that a program of the first product has at once: each needs a register for every column of P."""
        return max(1, min(8, 64 // self.rank))

    def each(self, line: str) -> list[str]:
        return [line.replace("#", str(k)) for k in range(self.rank)]


def source(thin: Thin) -> str:
    """Return all kernels.

    >>> "acc_3" in source(Thin(4)), "acc_4" in source(Thin(4))
    (True, False)
    """
    return "\n\n".join([_first(thin), _orthogonalise(thin), _second(thin), _spread(thin)])


def _first(thin: Thin) -> str:
    """Return the kernel of P = (G + e) Q: a program has some rows."""
    acc = f"({thin.rows}, {WIDE // 4}, 4)"
    load = [
        "where = flat + at + here + lane",
        "e = read(where, inside, WHOLE)",
        "if RESIDUAL:",
        "    e += read(residual + at + here + lane, inside, WHOLE)",
        "    tl.store(where, e, mask=inside & mine)",
    ]
    add = thin.each(
        f"acc_# += tl.sum(tl.reshape(e * read(right + tl.minimum(#, rank - 1) * columns + lane, inside, WHOLE), {acc}), 2)"
    )
    turn = [f"lane = turn * {WIDE} + tl.arange(0, {WIDE})[None, :]", "inside = lane < columns", *load, *add]
    full, rest = (
        indent("\n".join(line.replace("WHOLE", word) for line in turn), "        ") for word in ("True", "False")
    )
    begin = thin.each(f"acc_# = tl.zeros(({thin.rows}, {WIDE // 4}), tl.float32)")
    end = thin.each("tl.store(left + # * rows + which, tl.sum(acc_#, 1), mask=(which < rows) & (# < rank))")
    return f"""
@triton.jit
def first(flat, residual, p, q, matrices, tiles, RESIDUAL: tl.constexpr, CHAIN: tl.constexpr, ALIGNED: tl.constexpr):
    row = tiles + tl.program_id(0) * 2
    matrix, top = tl.load(row).to(tl.int32), tl.load(row + 1).to(tl.int32)
{indent(_FACTS, "    ")}
    which = top + tl.arange(0, {thin.rows})
    mine = which[:, None] < rows
    here = tl.minimum(which, rows - 1)[:, None].to(tl.int64) * columns
{indent(chr(10).join(begin), "    ")}
    follow(CHAIN)
    turn = tl.zeros((), tl.int32)
    while (turn + 1) * {WIDE} <= columns:
{full}
        turn += 1
    if turn * {WIDE} < columns:
{rest}
{indent(chr(10).join(end), "    ")}
"""


def _orthogonalise(thin: Thin) -> str:
    """Return the kernel that makes columns orthonormal in place: a program has a whole P.

    Their products, in double precision, are eliminated, and beside them the unit matrix becomes the inverse of
    Cholesky's factor. A column that depends on those before it is replaced by random numbers, and all start again; a
    NaN makes all NaN.
    """
    pairs = [(i, j) for i in range(thin.rank) for j in range(i + 1)]
    names = [f"g_{i}_{j}" for i, j in pairs]
    loads = thin.each("x_# = tl.load(p + # * rows + at, mask=(at < rows) & (# < rank), other=0.0).to(tl.float64)")
    sums = [f"g_{i}_{j} += tl.sum(tl.reshape(x_{i} * x_{j}, ({COLUMN // 4}, 4)), 1)" for i, j in pairs]
    made = [
        f"y_{i} = ({' + '.join(f'w_{i}_{j} * x_{j}' for j in range(i + 1))}).to(tl.float32)" for i in range(thin.rank)
    ]
    chance = thin.each("y_# = tl.where(gone_#, uniform(# * rows + at, tried * 7919 + 1) - 0.5, y_#)")
    stores = thin.each("tl.store(p + # * rows + at, y_#, mask=(at < rows) & (# < rank))")
    begin = [f"{name} = tl.zeros(({COLUMN // 4},), tl.float64)" for name in names]
    first, other = ", ".join(f"a_{name}" for name in names), ", ".join(f"b_{name}" for name in names)
    many = ", ".join(names)
    return f"""
@triton.jit
def added({first}, {other}):
    return {", ".join(f"a_{name} + b_{name}" for name in names)}


@triton.jit
def orthogonalise(p, matrices, CHAIN: tl.constexpr, ALIGNED: tl.constexpr):
    facts = matrices + tl.program_id(0) * {FACTS}
    rows, rank = tl.multiple_of(tl.load(facts + 1).to(tl.int32), ALIGNED), tl.load(facts + 5).to(tl.int32)
    p += tl.multiple_of(tl.load(facts + 3), ALIGNED)
    follow(CHAIN)
    tried, going = tl.zeros((), tl.int32), 1
    while going > 0:
{indent(chr(10).join(begin), "        ")}
        turn = tl.zeros((), tl.int32)
        while turn * {COLUMN} < rows:
            at = turn * {COLUMN} + tl.arange(0, {COLUMN})
{indent(chr(10).join(loads + sums), "            ")}
            turn += 1
        {many}{"," if len(names) == 1 else ""} = tl.reduce(({many},), 0, added)
{indent(chr(10).join(_eliminated(thin)), "        ")}
        turn = tl.zeros((), tl.int32)
        while turn * {COLUMN} < rows:
            at = turn * {COLUMN} + tl.arange(0, {COLUMN})
{indent(chr(10).join(loads + made), "            ")}
            if going > 0:
{indent(chr(10).join(chance), "                ")}
            tl.debug_barrier()  # all have read what is overwritten
{indent(chr(10).join(stores), "            ")}
            turn += 1
        tl.debug_barrier()
        tried += 1
        going = tl.where(tried < 3, going, 0)
"""


def _eliminated(thin: Thin) -> list[str]:
    """Return scalar code of the elimination.

    `w_i_j` is the weight of column j in the new column i, `gone_i` is true if it depends on those before, `going` if
    any does.
    """
    lines, every = ["going = 0"], range(thin.rank)
    for k in every:
        lines += [f"w_{k}_{k} = 1.0", f"square_{k} = g_{k}_{k}"]
    for k in every:
        lines += [
            f"gone_{k} = g_{k}_{k} <= {SAME} * square_{k}",
            f"scale = tl.where(gone_{k}, 0.0, 1.0 / tl.sqrt(tl.where(gone_{k}, 1.0, g_{k}_{k})))",
            *(f"w_{k}_{j} *= scale" for j in range(k + 1)),
            f"going = tl.where(gone_{k} & ({k} < rank), 1, going)",
        ]
        for i in range(k + 1, thin.rank):
            lines.append(f"l_{i} = g_{i}_{k} * scale")
            lines += [
                f"w_{i}_{j} {'=' if j == k else '-='} {'-' if j == k else ''}l_{i} * w_{k}_{j}" for j in range(k + 1)
            ]
            lines += [f"g_{i}_{j} -= l_{i} * l_{j}" for j in range(k + 1, i + 1)]
    return lines


def _second(thin: Thin) -> str:
    """Return the kernel of Q = (G + e)' P: a program has some rows of some columns.

    The last program to end adds up all partial sums, always in the same order.
    """
    load = "e_{i} = read(flat + at + (line + {i}).to(tl.int64) * columns + column, inside, WHOLE)"
    add = "acc_# += e_{i} * tl.load(left + tl.minimum(#, rank - 1) * rows + line + {i})"
    turns = [
        [*_rows(many, [load]), *_rows(many, thin.each(add)), f"line += {many}"]
        for many in (AT_ONCE, 1)
    ]  # fmt: skip
    begin = thin.each(f"acc_# = tl.zeros(({LANES},), tl.float32)")
    alone = thin.each("tl.store(right + # * columns + column, acc_#, mask=inside & (# < rank))")
    kept = thin.each(f"tl.store(own + (chunk * {thin.rank} + #) * columns + column, acc_#, mask=inside)")
    join = [
        *thin.each(f"total_# = tl.zeros(({JOINED}, {LANES}), tl.float32)"),
        "turn = tl.zeros((), tl.int32)",
        f"while turn * {JOINED} < chunks:",
        f"    which = turn * {JOINED} + tl.arange(0, {JOINED})[:, None]",
        "    told = (which < chunks) & inside[None, :]",
        f"    of = own + which * {thin.rank} * columns + column[None, :]",
        *thin.each("    total_# += tl.load(of + # * columns, mask=told, other=0.0, cache_modifier='.cg')"),
        "    turn += 1",
        *thin.each("tl.store(right + # * columns + column, tl.sum(total_#, 0), mask=inside & (# < rank))"),
    ]
    passed = "flat, matrix, p, q, partial, counters, matrices, chunk, block"
    return f"""
@triton.jit
def second_tile({passed}, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):
{indent(_FACTS, "    ")}
    column = block * {LANES} + tl.arange(0, {LANES})
    inside = column < columns
{indent(chr(10).join(begin), "    ")}
    line, end = chunk * {CHUNK}, tl.minimum((chunk + 1) * {CHUNK}, rows)
    while line + {AT_ONCE} <= end:
{indent(chr(10).join(turns[0]), "        ")}
    while line < end:
{indent(chr(10).join(turns[1]), "        ")}
    chunks = tl.load(facts + 8).to(tl.int32)
    if chunks == 1:
{indent(chr(10).join(alone), "        ")}
    else:
        own, counter = partial + tl.load(facts + 7), counters + tl.load(facts + 6) + block
{indent(chr(10).join(kept), "        ")}
        tl.debug_barrier()  # all threads have written theirs
        if tl.atomic_add(counter, 1, sem="acq_rel") == chunks - 1:
            tl.store(counter, 0)
{indent(chr(10).join(join), "            ")}


@triton.jit
def second(flat, p, q, partial, counters, matrices, tiles, CHAIN: tl.constexpr, ALIGNED: tl.constexpr):
    row = tiles + (tl.num_programs(0) - 1 - tl.program_id(0)) * 3  # where the first product has ended: in the cache
{indent(_TILE, "    ")}
    follow(CHAIN)
    if (block + 1) * {LANES} <= columns:
        second_tile({passed}, ALIGNED, True)
    else:
        second_tile({passed}, ALIGNED, False)
"""


def _spread(thin: Thin) -> str:
    """Return the kernel of G = P Q'; the difference to the old value is the residual, and bad gradients become NaN."""
    known = thin.each("q_# = tl.load(right + # * columns + column, mask=inside & (# < rank), other=0.0)")
    load = thin.each("p_{i}_# = tl.load(left + tl.minimum(#, rank - 1) * rows + line + {i})")
    row = [
        f"value = {' + '.join(thin.each('p_{i}_# * q_#'))}",
        "of = at + (line + {i}).to(tl.int64) * columns + column",
        "if RESIDUAL:",
        "    e = read(flat + of, inside, WHOLE)",
        "    if not bad:",
        "        write(residual + of, e - value, inside, WHOLE)",
        "write(flat + of, tl.where(bad, float('nan'), value), inside, WHOLE)",
    ]
    turns = [[*_rows(many, load), *_rows(many, row), f"line += {many}"] for many in (SPREAD_AT_ONCE, 1)]
    passed = "flat, residual, p, q, flags, matrices, matrix, chunk, block"
    return f"""
@triton.jit
def spread_tile({passed}, RESIDUAL: tl.constexpr, CHAIN: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):
{indent(_FACTS, "    ")}
    column = block * {WIDE} + tl.arange(0, {WIDE})
    inside = column < columns
    follow(CHAIN)
    bad = tl.load(flags + matrix) != 0
{indent(chr(10).join(known), "    ")}
    line, end = chunk * {SPREAD}, tl.minimum((chunk + 1) * {SPREAD}, rows)
    while line + {SPREAD_AT_ONCE} <= end:
{indent(chr(10).join(turns[0]), "        ")}
    while line < end:
{indent(chr(10).join(turns[1]), "        ")}


@triton.jit
def spread(flat, residual, p, q, flags, matrices, tiles,
           RESIDUAL: tl.constexpr, CHAIN: tl.constexpr, ALIGNED: tl.constexpr):
    row = tiles + tl.program_id(0) * 3
{indent(_TILE, "    ")}
    if (block + 1) * {WIDE} <= columns:
        spread_tile({passed}, RESIDUAL, CHAIN, ALIGNED, True)
    else:
        spread_tile({passed}, RESIDUAL, CHAIN, ALIGNED, False)
"""


def _rows(many: int, lines: list[str]) -> list[str]:
    """Return the lines for each of `many` rows."""
    return [line.replace("{i}", str(i)) for i in range(many) for line in lines]
