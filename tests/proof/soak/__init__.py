"""Hours of mixed collectives, every element checked, and what the processes use meanwhile."""
