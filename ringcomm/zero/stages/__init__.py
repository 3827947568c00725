"""ZeRO stages 0-3: parameters in buckets, unsharded and reduced by units."""
