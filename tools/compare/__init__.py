# SPDX-License-Identifier: Apache-2.0
"""``make compare``: times ringcomm and other libraries in one session, and writes the tables."""
