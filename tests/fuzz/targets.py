"""Every decoder that sees bytes of a peer, as a function of bytes that raises only where the decoder breaks its promise.

Each says whether the bytes were taken; so a test can tell that the valid examples in the corpus still are.
"""

from collections.abc import Callable

from tests.fuzz import (
    dht_targets,
    file_targets,
    gossip_targets,
    pipeline_targets,
    record_targets,
    request_targets,
    silo_targets,
)

TARGETS: dict[str, Callable[[bytes], bool]] = {
    target.__name__: target
    for target in (
        record_targets.record,
        record_targets.unsigned_record,
        record_targets.header,
        record_targets.presence,
        record_targets.adapter_offer,
        record_targets.body,
        record_targets.packed_body,
        record_targets.entry,
        record_targets.manifest,
        record_targets.manifest_content,
        record_targets.answer,
        request_targets.request,
        request_targets.response,
        request_targets.blob_request,
        request_targets.reach,
        request_targets.gateway,
        request_targets.gateway_request,
        request_targets.merge_request,
        request_targets.merge_answer,
        request_targets.final_request,
        request_targets.final_answer,
        request_targets.order,
        pipeline_targets.stage_bundle,
        pipeline_targets.stage_order,
        pipeline_targets.stage_answer,
        request_targets.certificate,
        request_targets.address,
        request_targets.binary_address,
        dht_targets.stored_entry,
        dht_targets.dictionary,
        dht_targets.dht_call,
        dht_targets.dht_reply,
        gossip_targets.gossip_frames,
        gossip_targets.gossip_stream,
        file_targets.peers_file,
        file_targets.rotation,
        file_targets.identity_export,
        file_targets.daemon_answer,
        silo_targets.silo_roll,
        silo_targets.silo_roll_content,
        silo_targets.silo_grant,
        silo_targets.silo_invitation,
        silo_targets.silo_invitation_content,
        silo_targets.silo_request,
        silo_targets.silo_question,
        silo_targets.silo_bulletin,
        silo_targets.silo_box,
        silo_targets.silo_sealed,
        silo_targets.silo_entry,
    )
}
