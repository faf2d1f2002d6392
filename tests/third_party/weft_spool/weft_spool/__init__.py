"""Spool: a broker of text files, as a system of Weft."""

from weft.systems import System

SYSTEM = System(
    kind="spool",
    connection="weft_spool.connection:SpoolConnection",
    endpoint="weft_spool.endpoint:SpoolEndpoint",
    stream_source="weft_spool.stream_source:SpoolSource",
    target="weft_spool.target:SpoolTarget",
    dead_letter_store="weft_spool.dead_letters:SpoolLetters",
    describes="Spool: queues of JSON messages in text files",
)
