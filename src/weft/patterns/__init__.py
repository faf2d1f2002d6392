"""Public names by pattern of use: `weft.patterns.streams` has the consumers."""

from weft.patterns import streams as streams
