from tokring.server.token_path.interface import TokenPath

NativeTokenPath: type[TokenPath]
