"""The communicator of one node on the host: calls, their order, their faults and their end."""
