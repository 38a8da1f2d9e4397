"""Translates a PTX kernel, as Triton emits it, to C++ on top of ``runtime.h``."""

import re
from dataclasses import dataclass
from pathlib import Path

import lightning_gnn.triton_kernels

KERNELS = Path(lightning_gnn.triton_kernels.__path__[0])
TYPES = {"pred": "bool", "f16": "f16", "bf16": "bf16", "f32": "float", "f64": "double"}
REGISTERS = {"pred": "bool", "b16": "u16", "b32": "u32", "b64": "u64", "f32": "u32", "f64": "u64", "s32": "u32"}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">"}
COMPARISONS["hs"] = ">="
# C++ of the typed operands; "add.f32" before "add".
EXPRESSIONS = {
    "mov": "{0}", "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "mul.lo": "{0} * {1}",
    "mad.lo": "{0} * {1} + {2}", "fma": "std::fma({0}, {1}, {2})", "div": "div_({0}, {1})", "rem": "rem_({0}, {1})",
    "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "~{0}", "not.pred": "!{0}", "neg": "-{0}",
    "abs": "std::abs({0})", "lg2": "std::log2({0})", "ex2": "std::exp2({0})", "min": "min_({0}, {1})",
    "max": "max_({0}, {1})", "sqrt": "std::sqrt({0})", "rcp": "1 / {0}",
}  # fmt: skip
ATOMICS = {
    "add": "old + {0}", "min": "min_(old, {0})", "max": "max_(old, {0})", "exch": "{0}", "and": "old & {0}",
    "or": "old | {0}", "xor": "old ^ {0}", "cas": "old == {0} ? {1} : old",
}  # fmt: skip
SPECIAL = {
    "%tid.x": "(u32)cur->tid", "%ntid.x": "(u32)threads", "%laneid": "(u32)(cur->tid & 31)",
    **{f"%ctaid.{axis}": f"(u32)cur->cta->{axis}" for axis in "xyz"},
    **{f"%nctaid.{axis}": f"(u32)grid[{i}]" for i, axis in enumerate("xyz")},
    "true": "true", "global_smem": "0u",
}  # fmt: skip


@dataclass(frozen=True)
class Site:
    """One instruction of a kernel that accesses global memory."""

    kind: str  # load, store or atomic
    place: tuple[str, int]  # file and line of the kernels' source


@dataclass(frozen=True)
class Translation:
    name: str
    threads: int
    sites: list[Site]
    cpp: str


def bits_of(kind):
    return int(re.sub(r"\D", "", kind))


def c_type(kind):
    return TYPES.get(kind) or kind.replace("b", "u")


def split(operands):
    """Split at the commas outside of brackets."""
    return [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", operands) if part.strip()]


def several(operand):
    """Return the operands of a vector ``{a, b}``, or the single one."""
    return split(operand.strip("{} ")) if operand.startswith("{") else [operand]


def value(operand):
    """Return an operand as C++."""
    if operand in SPECIAL:
        return SPECIAL[operand]
    if operand.startswith("%"):
        return operand[1:].replace(".", "_")
    if operand.isidentifier():
        return f"local_{operand}"
    if literal := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", operand):
        return f"0x{literal[1]}ull"
    return f"{int(operand.rstrip('U'), 0) & (2**64 - 1):#x}ull"


def typed(operand, kind):
    return f"as<{c_type(kind)}>({value(operand)})"


def address(operand):
    """Return ``[a + b]`` as C++."""
    return " + ".join(f"(u64){value(part.strip())}" for part in operand.strip("[] ").split("+"))


def write(target, expression):
    return f"(void)({expression});" if target == "_" else f"set({value(target)}, {expression});"


def wide(kind):
    """Return the C++ type of twice the width."""
    return f"{kind[0]}{2 * bits_of(kind)}"


def access(parts, kind, operands):
    """Translate ld or st of shared or global memory."""
    size, shared = bits_of(kind) // 8, "shared" in parts
    places, where = (several(operands[0]), operands[1]) if parts[0] == "ld" else (several(operands[1]), operands[0])
    # A vector is one request of its whole width, so it must be aligned to that.
    code = f"u64 at = {address(where)}; " + (f"aligned(at, {size * len(places)}); " if not shared else "")
    for i, place in enumerate(places):
        at = f"at + {i * size}, {size}"
        if parts[0] == "st":
            code += f"{'store_shared' if shared else 'store'}({at}, {value(place)}); "
            continue
        strong = {"volatile", "relaxed", "acquire"} & set(parts) and not shared
        read = f"load_strong({at}, {str('acquire' in parts).lower()})" if strong else f"load({at})"
        code += f"auto t{i} = ({c_type(kind)}){f'load_shared({at})' if shared else read}; "
    if parts[0] == "ld":
        code += " ".join(write(place, f"t{i}") for i, place in enumerate(places))
    return f"{{ {code} }}"


def atomic(parts, kind, operands):
    """Translate atom and red."""
    target, where, *values = operands if parts[0] == "atom" else ["_", *operands]
    how = next(ATOMICS[part] for part in parts[1:] if part in ATOMICS)
    flags = [str(any(name in parts for name in (flag, "acq_rel"))).lower() for flag in ("acquire", "release")]
    change = f"[&](T old) -> T {{ return {how.format(*(typed(v, kind) for v in values))}; }}"
    call = f"atomic<T>({address(where)}, {', '.join(flags)}, {change})"
    return f"{{ typedef {c_type(kind)} T; {write(target, call)} }}"


def compare(parts, kind, operands):
    """Translate setp."""
    a, b = typed(operands[1], kind), typed(operands[2], kind)
    nan = f"({a} != {a} || {b} != {b})"
    name = parts[1]
    if name in ("num", "nan"):
        found = nan if name == "nan" else f"!{nan}"
    elif name in COMPARISONS:
        found = f"({a} {COMPARISONS[name]} {b})" + (f" && !{nan}" if name == "ne" and "f" in kind else "")
    else:
        found = f"({nan} || {a} {COMPARISONS[name.removesuffix('u')]} {b})"
    if len(operands) > 3:  # setp.lt.and.s32
        found = f"({found}) {dict(zip(('and', 'or', 'xor'), '&|^', strict=True))[parts[2]]} {value(operands[3])}"
    return write(operands[0], found)


def move(kind, operands):
    """Translate mov, also between a register and its parts."""
    target, source = map(several, operands)
    if len(target) > 1:
        width = bits_of(kind) // len(target)
        return " ".join(
            write(t, f"(u{width})({value(source[0])} >> {i * width})") for i, t in enumerate(target) if t != "_"
        )
    width = bits_of(kind) // len(source) if kind != "pred" else 0
    if len(source) > 1:
        return write(target[0], " | ".join(f"(u64)(u{width}){value(s)} << {i * width}" for i, s in enumerate(source)))
    return write(target[0], typed(source[0], kind))


def convert(parts, operands):
    """Translate cvt; two floats are packed, the first one above."""
    to, kind = parts[-2:]
    if to in ("f16x2", "bf16x2"):
        halves = [f"bits16({c_type(to[:-2])}({typed(operand, kind)}))" for operand in operands[1:]]
        return write(operands[0], f"(u32){halves[0]} << 16 | {halves[1]}")
    rounding = {"rni": "std::nearbyint", "rmi": "std::floor", "rpi": "std::ceil"}
    how = next((rounding[part] for part in parts if part in rounding), "")
    middle = "(float)" if "f16" in (to, kind) or "bf16" in (to, kind) else ""
    return write(operands[0], f"({c_type(to)}){how}({middle}{typed(operands[1], kind)})")


def matrices(name, operands):
    """Translate ldmatrix and stmatrix."""
    where, values = operands if name == "stmatrix" else reversed(operands)
    values = several(values)
    given = ", ".join(f"(u32){value(v)}" if name == "stmatrix" else "0" for v in values)
    each = "store_shared(at, 4, o[m])" if name == "stmatrix" else "o[m] = load_shared(at, 4)"
    done = f"u32 o[] = {{{given}}}; matrices({len(values)}, {address(where)}, [&](int m, u32 at) {{ {each}; }});"
    return f"{{ {done} " + " ".join(write(v, f"o[{i}]") for i, v in enumerate(values) if name == "ldmatrix") + " }"


def instruction(opcode, operands):
    """Return the C++ of one instruction, or None if it is unknown."""
    parts, kind = opcode.split("."), opcode.rpartition(".")[2]
    name = parts[0]
    simple = {
        "bar": "barrier();", "barrier": "barrier();", "fence": "release(); acquire();",
        "membar": "release(); acquire();", "ret": "return;",
    }  # fmt: skip
    if name in simple:
        return "exchange(0);" if parts[1:2] == ["warp"] else simple[name]
    if name == "mov":
        return move(kind, operands)
    if name == "cvt":
        return convert(parts, operands)
    if name == "setp":
        return compare(parts, kind, operands)
    if name in ("atom", "red"):
        return atomic(parts, kind, operands)
    if name in ("ld", "st") and parts[1] == "param":
        number = re.search(r"_param_(\d+)", operands[1])[1]
        return f"{{ {c_type(kind)} t; memcpy(&t, params[{number}], sizeof t); {write(operands[0], 't')} }}"
    if name in ("ld", "st"):
        return access(parts, kind, operands)
    if name == "bra":
        return f"goto {label(operands[0])};"
    if name == "cvta":
        return write(operands[0], value(operands[1]))
    if name == "selp":
        return write(operands[0], f"{value(operands[3])} ? {typed(operands[1], kind)} : {typed(operands[2], kind)}")
    if name in ("shl", "shr"):
        return write(operands[0], f"{name}_({typed(operands[1], kind)}, (u32){value(operands[2])})")
    if name == "bfe":
        # The bits move to the upper end, and back down with zeros, or with copies of the sign.
        low, count = (f"(u32){value(o)}" for o in operands[2:])
        upper = f"shl_({typed(operands[1], kind.replace('s', 'u'))}, {bits_of(kind)} - {low} - {count})"
        return write(operands[0], f"shr_(as<{c_type(kind)}>({upper}), {bits_of(kind)} - {count})")
    if name == "popc":
        return write(operands[0], f"__builtin_popcountll({typed(operands[1], kind)})")
    if name == "prmt":
        return write(operands[0], f"prmt({', '.join(value(o) for o in operands[1:])})")
    if name == "shfl":
        return write(operands[0].split("|")[0], f"shfl('{parts[2][0]}', {', '.join(value(o) for o in operands[1:4])})")
    if name == "redux":
        how = ATOMICS[parts[2]].format("x")
        return write(
            operands[0],
            f"reduce({value(operands[1])}, [](u32 a, u32 b) -> u32 {{ {c_type(kind)} old = a, x = b; return {how}; }})",
        )
    if name == "vote":
        return write(operands[0], f"ballot({value(operands[1])})") if parts[2] == "ballot" else None
    if name in ("ldmatrix", "stmatrix") and "trans" not in parts:
        return matrices(name, operands)
    if name in ("mul", "mad") and parts[1] in ("hi", "wide"):
        product = f"({wide(kind)}){typed(operands[1], kind)} * {typed(operands[2], kind)}"
        product = f"(({product}) >> {bits_of(kind)})" if parts[1] == "hi" else product
        return write(
            operands[0],
            product
            + (f" + as<{wide(kind) if parts[1] == 'wide' else kind}>({value(operands[3])})" if name == "mad" else ""),
        )
    how = EXPRESSIONS.get(f"{name}.{parts[1]}") or EXPRESSIONS.get(name)
    return how and write(operands[0], f"({c_type(kind)})({how.format(*(typed(o, kind) for o in operands[1:]))})")


def place_of(loc):
    """Return the innermost place of a ``.loc`` outside of Triton's own library, from its comment."""
    places = [(name, int(line)) for name, line in re.findall(r"(\w+\.py):(\d+):\d+", loc)]
    return next((place for place in places if place[0] != "standard.py"), ("", 0))


def label(name):
    return "L" + name.strip().replace("$", "_")


def translate(ptx):
    """Translate the only kernel of a PTX module; raise NotImplementedError with the instructions that are unknown."""
    plain = re.sub(r"(?m)^(?!\s*\.loc)(.*?)//.*$", r"\1", ptx)
    name, _, head, body = re.search(r"\.entry (\w+)\((.*?)\)\s*(.*?)\{(.*)\n\}", plain, re.S).groups()
    body = body.split(".section")[0]
    code = []
    for kind, prefix, count in re.findall(r"\.reg \.(\w+)\s+%(\w+)<(\d+)>;", body):
        code.append(f"  {REGISTERS[kind]} " + ", ".join(f"{prefix}{i} = 0" for i in range(int(count))) + ";")
    for kind, local in sorted(set(re.findall(r"\.reg \.(\w+)\s+([A-Za-z]\w*);", body))):  # of inline assembly
        code.append(f"  {REGISTERS[kind]} local_{local} = 0;")
    tables = {at: split(labels) for at, labels in re.findall(r"(\$\w+):\s*\.branchtargets\s*(.*?);", body, re.S)}
    body = re.sub(r"\{\s*\.reg \.\w+ [A-Za-z]\w*;([^\n]*?;)\s*\}", r"\1", body)
    body = re.sub(r"\$\w+:\s*\.branchtargets\s*.*?;", "", body, flags=re.S)
    sites, unknown, place = [], [], ("", 0)
    for line in map(str.strip, body.split("\n")):
        if found := re.fullmatch(r"(\$?\w+):", line):
            code.append(f"{label(found[1])}:;")
        elif line.startswith(".loc"):
            place = place_of(line)
        elif line and not line.startswith((".reg", ".pragma", "#")):
            for text in filter(None, (part.strip() for part in line.strip("{}" if line in "{}" else "").split(";"))):
                found = re.match(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)$", text)
                if not found:
                    unknown.append(text)
                    continue
                negated, predicate, opcode, rest = found.groups()
                operands = split(rest)
                if opcode == "brx.idx":
                    jumps = " ".join(f"case {i}: goto {label(to)};" for i, to in enumerate(tables[operands[1]]))
                    done = f"switch ({value(operands[0])}) {{ {jumps} }}"
                else:
                    done = instruction(opcode, operands)
                if done is None:
                    unknown.append(text)
                elif predicate:
                    done = f"if ({'!' if negated else ''}{value(predicate)}) {{ {done} }}"
                if found := re.match(r"(ld|st|atom|red)\b(?!.*(shared|param))", opcode):
                    kind = {"ld": "load", "st": "store"}.get(found[1], "atomic")
                    done = f"site({len(sites)}); {done}"
                    sites.append(Site(kind, place))
                code.append(f"  {done}")
    if unknown:
        raise NotImplementedError(f"{name} contains instructions that tests/ptx does not translate: {unknown[:20]}")
    cpp = '#include "runtime.h"\nstatic void kernel_body() {\n' + "\n".join(code) + "\n}\n"
    return Translation(name, int(re.search(r"\.(?:reqntid|maxntid) (\d+)", head)[1]), sites, cpp)


def source_of(place):
    """Return the function and the text of a line of the kernels."""
    path = KERNELS / place[0]
    if not path.is_file():
        return ""
    lines = path.read_text().splitlines()
    function = next((line for line in reversed(lines[: place[1]]) if line.startswith("def ")), "")
    return f"{function[4:].partition('(')[0]}: {lines[place[1] - 1].strip()}"
