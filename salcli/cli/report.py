def report() -> None:
    """x"""
