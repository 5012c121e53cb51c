from omni_connector.transports.arena import Arena
from omni_connector.transports.base import Endpoint, OmniConnector, RemoteArena
def create_transport(name, *, namespace):
    from omni_connector.transports._tmp_shm import Tmp
    return Tmp(namespace)
