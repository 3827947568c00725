"""What several test directories share: spawned ranks, exact inputs, fault injection."""
