"""Audits of private schemes: what leaves nodes and servers, tested against what the ledgers say."""
