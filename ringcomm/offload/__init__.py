"""Scratch files: a rank's unnamed file on a disk, and memory whose content is kept in the file."""
