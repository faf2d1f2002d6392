"""What happens to the rows of a pipeline before they are loaded: `from weft.transforms import filter_where`."""

from weft.pipelines.transforms import deduplicate_by, filter_where, limit, sample_pct

__all__ = ["deduplicate_by", "filter_where", "limit", "sample_pct"]
