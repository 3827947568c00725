"""Scratch files: a rank's file on a disk, and memory whose content is in it."""
