"""Signed records of the wire protocol: identities, signatures, formats, and the reasons for refusing a record."""
