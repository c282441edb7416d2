from tokring.server.token_path.interface import TokenPath

NativeTokenPath: type[TokenPath]

def json_shape(text: bytes) -> tuple[int, int, int, int]:
    """(greatest nesting, lists and objects, strings, commas between values) of a JSON text. Without the GIL."""
