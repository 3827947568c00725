# SPDX-License-Identifier: Apache-2.0
"""The communicator of one node on the host: its calls, their order, and the end of calls.

Start with ``engine.py`` (the order of calls), then ``collectives.py``; ``core.py`` declares the
interface between them and the native module.
"""
