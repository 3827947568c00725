"""Helpers of several test directories: spawned ranks, exact inputs, fault injection."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
