"""Chooses one type, integers or texts, for all columns with ids of the same nodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from lightning_gnn.datasets.table_files import INTEGER_TYPES, TableFiles, as_name, as_text, describe_row

IdRule: TypeAlias = Literal["auto", "number", "text"]
ID_RULES = get_args(IdRule)
_FLOAT_BITS = {"FLOAT": 24, "DOUBLE": 53}  # integers below 2 to this power are exact
_MAX_STRAY_FRACTION = 0.1  # maximum number of texts per number for texts to be taken for mistakes
_PLAIN = as_text(r"\s*[+-]?[0-9]+(\.0*)?\s*")
_NUMBER = as_text(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")
_PADDED = as_text(r"^\s*[+-]?0[0-9]")


@dataclass(frozen=True)
class IdColumn:
    """A column that holds ids of nodes."""

    table: str
    name: str
    path: str | Path  # named in messages


def unify_ids(
    database: TableFiles, columns: Sequence[IdColumn], rule: IdRule, known: bool | None, say: Callable[[str], None]
) -> None:
    """Convert columns with ids of the same nodes to integers or to texts.

    Ids that are all integers, however written (``7``, ``7.0``, ``7e0``), become integers, and all others texts.
    ``rule="number"`` also reads ``007`` as 7; ``rule="text"`` leaves texts as they are written. ``known``: whether a
    table lists all ids, so that no text is taken for a mistake; None: the table follows, so that nothing is refused.

    Raises:
        ValueError: An id is empty, a float is not exact, a few ids are texts, or two texts are the same number.
    """
    types = [database.columns(column.table)[column.name] for column in columns]
    if all(sql_type in INTEGER_TYPES for sql_type in types):
        return
    texts = [
        f"SELECT {_text_of(column.name, sql_type)} AS id, rowid AS place FROM {as_name(column.table)}"
        for column, sql_type in zip(columns, types, strict=True)
    ]

    def refuse(condition: str, problem: str) -> None:
        """Raise an error that names the first row with an id for which a condition holds."""
        found = [
            (place, column, value)
            for column, rows in zip(columns, texts, strict=True)
            for value, place in database.query(f"SELECT * FROM ({rows}) WHERE {condition} ORDER BY place LIMIT 1")
        ]
        place, column, value = min(found, key=lambda row: row[0])
        where = f"the {column.name} of {describe_row(column.path, place)}, {value!r}, "
        raise ValueError(f"{column.path}: {where}{problem}")

    # Floats of typed files may have lost digits of large ids.
    for position, (column, sql_type) in enumerate(zip(columns, types, strict=True)):
        bits, value = _FLOAT_BITS.get(sql_type), as_name(column.name)
        inexact = f"isfinite({value}) AND abs({value}) >= {1 << (bits or 0)}"
        if bits and database.query(f"SELECT 1 FROM {as_name(column.table)} WHERE {inexact} LIMIT 1"):
            columns, texts = [column], [texts[position]]
            refuse(
                f"abs(TRY_CAST(id AS DOUBLE)) >= {1 << bits}",
                f"is a {sql_type.lower()} above 2^{bits}, where ids are not exact; store ids as integers or texts",
            )
    rows = f"SELECT id, {_number_of('id')} AS number FROM ({' UNION ALL '.join(texts)}) WHERE id IS NOT NULL"
    facts = "trim(id) = ''", "number IS NULL", "number IS NOT NULL", f"regexp_matches(id, {_PADDED})"
    chosen = ", ".join(f"coalesce(bool_or({fact}), false)" for fact in facts)
    any_empty, any_text, any_number, any_padded, least, most = database.query(
        f"SELECT {chosen}, min(number), max(number) FROM ({rows})"
    )[0]
    if any_empty and known is not None:
        refuse("trim(id) = ''", "is empty; write the id, or remove the row")
    if any_text and rule == "number" and known is not None:
        refuse(f"{_number_of('id')} IS NULL", "is not an integer, as which ids=number reads it")
    if not any_text and (rule == "number" or (rule == "auto" and not any_padded)):
        sql_type = "BIGINT" if (least or 0) >= -(1 << 63) and (most or 0) < 1 << 63 else "HUGEINT"
        pending = [(c, sql_type, _number_of(_text_of(c.name, t))) for c, t in zip(columns, types, strict=True)]
        _convert(database, [job for job, t in zip(pending, types, strict=True) if t not in INTEGER_TYPES])
        return
    if known is None:
        return
    # Texts must neither be mistakes among numbers nor several spellings of one number.
    if any_number and rule == "auto":
        distinct = f"SELECT DISTINCT id, number FROM ({rows})"
        num_texts, num_numbers = database.query(f"SELECT count(*) - count(number), count(number) FROM ({distinct})")[0]
        if not known and 0 < num_texts <= _MAX_STRAY_FRACTION * num_numbers:
            others = f"but {num_numbers:,} of {num_texts + num_numbers:,} ids are integers"
            refuse(f"{_number_of('id')} IS NULL", f"is not an integer, {others}; correct it, or accept it by ids=text")
        same = f"SELECT min(id), max(id) FROM ({distinct}) WHERE number IS NOT NULL GROUP BY number HAVING count(*) > 1"
        for first, second in database.query(f"{same} ORDER BY 1 LIMIT 1"):
            fix = "ids=text keeps them apart" + ("" if any_text else ", and ids=number reads both as one node")
            refuse(f"id = {as_text(first)}", f"is the same number as {second!r}, which occurs too; {fix}")
        if num_texts and not known:
            say(f"{num_texts:,} ids are texts and {num_numbers:,} are integers, so all are read as texts")
    pending = [(c, "VARCHAR", _text_of(c.name, t)) for c, t in zip(columns, types, strict=True) if t != "VARCHAR"]
    _convert(database, pending)


def _convert(database: TableFiles, pending: Sequence[tuple[IdColumn, str, str]]) -> None:
    """Change the types of columns, all or none."""
    with database.transaction():
        for column, sql_type, value in pending:
            table, name = as_name(column.table), as_name(column.name)
            database.query(f"ALTER TABLE {table} ALTER COLUMN {name} TYPE {sql_type} USING {value}")


def _text_of(column: str, sql_type: str) -> str:
    """Return the SQL expression of an id as a text; floats that are integers are written as such."""
    name = as_name(column)
    if sql_type not in _FLOAT_BITS:
        return f"{name}::VARCHAR"
    is_integer = f"{name} = floor({name}) AND abs({name}) < {1 << _FLOAT_BITS[sql_type]}"
    return f"CASE WHEN isnan({name}) THEN NULL WHEN {is_integer} THEN {name}::BIGINT::VARCHAR ELSE {name}::VARCHAR END"


def _number_of(text: str) -> str:
    """Return the SQL expression of the integer that a text denotes, NULL if it denotes none."""
    # A cast to integers rounds, so a text with decimals or an exponent must be whole as both kinds of fractions.
    whole = " AND ".join(
        f"floor(TRY_CAST({text} AS {fraction})) = TRY_CAST({text} AS {fraction})"
        for fraction in ("DOUBLE", "DECIMAL(38, 6)")
    )
    return (
        f"CASE WHEN regexp_full_match({text}, {_PLAIN}) OR (regexp_full_match({text}, {_NUMBER}) AND {whole}) "
        f"THEN TRY_CAST({text} AS HUGEINT) END"
    )
