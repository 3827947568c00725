"""ZeRO stages 0-3: parameters in buckets, gathered and reduced by units."""
