"""Programs that train with ringcomm, and that its commands run."""
