"""Functions of the schema: they run no code of others, and only who may calls them."""

from __future__ import annotations

import re
from contextlib import closing

import psycopg2
import pytest
from psycopg2.errors import InsufficientPrivilege
from psycopg2.extensions import make_dsn

from tests.tx.postgres.support import LOG, new_token, poor_role, rows

OWN = """
FROM pg_proc WHERE pronamespace = 'txmq'::regnamespace
    OR pronamespace = 'public'::regnamespace AND proname LIKE 'txmq%'
"""
# What a function without a search path of its own may leave without a schema.
KEYWORD_TYPES = ("bigint", "boolean", "integer", "timestamp")
# They compare with the operator that the search path finds.
COMPARING = r"\b(?:IN|NULLIF|BETWEEN|LIKE|DISTINCT)\b"
ATTACK = """
CREATE FUNCTION pg_temp.note() RETURNS boolean LANGUAGE plpgsql
AS $$ BEGIN RAISE EXCEPTION 'run as %', current_user; END $$;
CREATE DOMAIN pg_temp.int8 AS bigint CHECK (pg_temp.note());
"""
# In schema `trap`: each name of PostgreSQL that the functions have, also as a part of
# another one, for something that raises an error when it is used.
TRAPS = f"""
CREATE SCHEMA trap;
GRANT USAGE ON SCHEMA trap TO PUBLIC;
CREATE FUNCTION trap.spring() RETURNS boolean LANGUAGE plpgsql
AS $$ BEGIN RAISE EXCEPTION 'trapped'; END $$;
DO $traps$
DECLARE
    source text := (SELECT string_agg(prosrc, ' ') {OWN});
    making text;
BEGIN
    FOR making IN
        SELECT format('CREATE DOMAIN trap.%I AS pg_catalog.%1$I CHECK (trap.spring())', typname)
        FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace AND typtype IN ('b', 'r', 'm')
            AND source ~ ('\\y' || typname || '\\y')
        UNION ALL
        SELECT format('CREATE FUNCTION trap.%I(%s) RETURNS %s LANGUAGE plpgsql '
            'AS ''BEGIN RAISE EXCEPTION ''''trapped''''; END''', proname,
            pg_get_function_identity_arguments(oid), pg_get_function_result(oid))
        FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND prokind = 'f'
            AND source ~ ('\\y' || proname || '\\y')
        UNION ALL
        SELECT format('CREATE FUNCTION trap.of_%s(%s, %s) RETURNS %s LANGUAGE plpgsql '
            'AS ''BEGIN RAISE EXCEPTION ''''trapped''''; END'';'
            'CREATE OPERATOR trap.%s (FUNCTION = trap.of_%1$s, LEFTARG = %2$s, RIGHTARG = %3$s)',
            oid, oprleft::regtype, oprright::regtype, oprresult::regtype, oprname)
        FROM pg_operator WHERE oprnamespace = 'pg_catalog'::regnamespace AND oprkind = 'b'
            AND position(oprname IN source) > 0
    LOOP
        BEGIN
            EXECUTE making;
        EXCEPTION WHEN OTHERS THEN  -- of types that SQL has no functions for
        END;
    END LOOP;
END $traps$;
"""


def unqualified(body: str, *, own_path: bool = False) -> list[str]:
    """Return what a function's body names without a schema: functions, types, tables,
    and operators unless the function has a search path of its own.
    """
    code = re.sub(r"'(?:[^']|'')*'|--[^\n]*", "''", body).replace("(epoch FROM ", "(")
    found = re.findall(r"(?<![\w.])[a-z]\w*(?=\()", code)
    found += re.findall(r"(?:FROM|JOIN|INSERT INTO|UPDATE|TABLE) ([a-z]\w*)(?![\w.(])", code)
    declared = re.findall(r"^    \w+ ([\w.]+)", code.partition("BEGIN")[0], re.MULTILINE)
    types = [*declared, *re.findall(r"::([\w.]+)", code)]
    found += [
        name for name in types if name not in KEYWORD_TYPES and not name.startswith("pg_catalog.")
    ]
    if not own_path:
        rest = re.sub(r"OPERATOR\(pg_catalog\.\S+?\)|:=|::", "", code)
        found += re.findall(rf"[-+*/<>=~!@#%^&|]+|{COMPARING}", rest)
    return found


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("SELECT system_identifier FROM pg_catalog.pg_control_system()", []),
        ("SELECT system_identifier FROM pg_control_system()", ["pg_control_system"]),
        ("DECLARE\n    stamp bigint;\nBEGIN", []),
        ("DECLARE\n    stamp int8;\nBEGIN", ["int8"]),
        ("RETURN 0::pg_catalog.text;  -- not int8::text", []),
        ("RETURN 0::text;", ["text"]),
        ("SELECT 1 FROM public.txmq_token WHERE tok OPERATOR(pg_catalog.=) $1", []),
        ("SELECT 1 FROM txmq_token WHERE tok = $1", ["txmq_token", "="]),
        ("RETURN a IN ('a')", ["IN"]),
    ],
)
def test_what_names_no_schema_is_found(body: str, found: list[str]) -> None:
    assert unqualified(body) == found


def test_each_function_names_all_with_its_schema_and_is_called_only_by_right(
    database: str,
) -> None:
    found = rows(
        database,
        "SELECT proname, prosrc, prosecdef, coalesce(proconfig, '{}'),"
        " proacl IS NULL OR EXISTS (SELECT FROM aclexplode(proacl) WHERE grantee = 0)"
        + OWN.replace("%", "%%"),
    )
    assert len(found) == 12
    for name, body, definer, settings, public in found:
        assert isinstance(settings, list)
        own_path = "search_path=pg_catalog, pg_temp" in settings
        assert (name, unqualified(str(body), own_path=own_path)) == (name, [])
        assert (name, public) == (name, False)
        # called in each transaction, and all that it names has a schema
        assert own_path or not definer or name == "txmq_outbox_stamp"


def test_a_role_without_rights_runs_no_code_as_the_owner(database: str) -> None:
    with (
        poor_role(database) as (_role, dsn),
        closing(psycopg2.connect(dsn)) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(ATTACK)
        with pytest.raises(InsufficientPrivilege, match="txmq_outbox_stamp"):
            cursor.execute(f"SELECT public.txmq_outbox_stamp('{LOG}')")


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_functions_use_nothing_that_others_have_put_in_the_way(
    database: str, isolation: str
) -> None:
    rows(
        database,
        f"INSERT INTO txmq_broker (log_id, name, reported_at) VALUES ('{LOG}', 'main', now())",
    )
    rows(database, TRAPS.replace("%", "%%"))
    trapped = "-c search_path=trap,pg_catalog -c client_min_messages=error"
    level = isolation.replace(" ", "\\ ")
    with poor_role(database) as (role, poor):
        dsn = make_dsn(poor, options=f"{trapped} -c default_transaction_isolation={level}")
        for schema in ("public", "txmq"):
            rows(database, f"GRANT ALL ON ALL FUNCTIONS IN SCHEMA {schema} TO {role}")
        rows(database, f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
        with pytest.raises(psycopg2.Error, match="trapped"):
            rows(dsn, "SELECT 1 = 1")
        for _ in range(2):
            for call, result in (
                (f"txmq_token_insert('{new_token()}', '{LOG}')", None),
                (f"txmq_outbox_waits('{LOG}', NULL)", None),
                (f"txmq_outbox_waits('{LOG}', '{{7}}')", None),
                (f"txmq_outbox_settle('{LOG}')", None),
                (f"txmq_outbox_stamp('{LOG}')", None),
                (f"txmq_claim('g', '{LOG}', 7, 0, 1, 3, '{{5}}')", 1),
                (f"txmq_claim('g', '{LOG}', 7, 0, 1, 3, '{{5,6,8}}')", 2),
            ):
                found = rows(dsn, f"SELECT public.{call}")
                assert result is None or len(found) == result
            rows(dsn, "SELECT txmq.send('orders', 'k', 'body', '{\"a\": \"b\"}')")
            rows(database, "TRUNCATE txmq_inbox_recent; ALTER SEQUENCE txmq_outbox_seq_seq RESTART")
        with pytest.raises(psycopg2.Error, match="could not open file"):
            rows(dsn, "SELECT public.txmq_timeline_history(9999)")
