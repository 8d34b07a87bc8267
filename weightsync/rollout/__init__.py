"""The receiving side: what loads a weight stream into a served model."""
