"""Helpers of several test directories: spawned ranks, exact inputs, fault injection."""
