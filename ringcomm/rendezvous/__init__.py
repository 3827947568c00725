"""The rendezvous of the ranks of one machine: environment variables, stores, heap handles."""
