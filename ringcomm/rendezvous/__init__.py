"""How the ranks of one machine find each other: environment variables, stores, heap handles."""
