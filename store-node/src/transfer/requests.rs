//! Answers that need no waiting.

use super::{
    connection::{OpenPut, Served},
    waiting::{MISS, TOO_MANY_LEASES, range_of},
};
use crate::{
    catalog::{Admission, BlockId, CommitError, Found, PartRead, Producer},
    node::Node,
};
use larder_proto::{
    BlockKey, ModelVersion, PartName, TierSet, block_key,
    frame::{
        Code, Commit, Committed, Header, Hello, HelloOk, Hinted, InProgress, KEYS_LIMIT, Lease,
        Lookup, LookupOk, Op, PutStaged, Read, Release, Reserve, ReuseHint, Role, Source, VERSION,
        decode_body, features,
    },
    ids::{TenantId, TenantName},
    part::PartRef,
    wire::{DecodeError, ShortText},
};
use std::sync::Arc;
use tokio::time::Instant;

/// The slot of a connection's tenant. Slots count within a connection, and a connection has one tenant.
const CONNECTION_TENANT: u32 = 0;

/// What hello settled for a connection.
#[derive(Debug, Clone)]
pub(super) struct Tenancy {
    /// Whose parts the connection reads and puts.
    pub(super) tenant: TenantId,
    /// The tenant's name, for masters.
    pub(super) name: TenantName,
    /// What stands for it in headers.
    pub(super) slot: u32,
    /// Recorded as producer of what is put.
    pub(super) producer: Arc<Producer>,
    /// Client or node.
    pub(super) role: Role,
}

/// Accepts a peer, or says why not.
pub(super) fn greet(node: &Node, hello: &Hello) -> Result<(Tenancy, HelloOk), (Code, String)> {
    if !(hello.version_min..=hello.version_max).contains(&VERSION) {
        let (min, max) = (hello.version_min, hello.version_max);
        return Err((
            Code::Version,
            format!("this node speaks {VERSION}, the peer {min} to {max}"),
        ));
    }
    if hello.key_check != block_key::self_check() {
        // Its keys would never meet ours: better no connection than a silent hit rate of zero (F34).
        let reason = format!(
            "the peer computes other block keys: {} instead of {} for the published chain",
            hello.key_check,
            block_key::self_check()
        );
        return Err((Code::Version, reason));
    }
    let slot = CONNECTION_TENANT;
    let producer = Producer {
        name: hello.producer.as_str().to_owned(),
        incarnation: hello.producer_incarnation,
    };
    let tenancy = Tenancy {
        tenant: hello.tenant.id(),
        name: hello.tenant.clone(),
        slot,
        producer: Arc::new(producer),
        role: hello.role,
    };
    let limits = node.limits();
    let answer = HelloOk {
        version: VERSION,
        features: hello.features & features::ALL,
        node: node.id(),
        incarnation: node.catalog().incarnation(),
        tenant_slot: slot,
        requests_limit: limits.requests,
        silence_limit_ms: u32::try_from(limits.silence.as_millis()).unwrap_or(u32::MAX),
    };
    Ok((tenancy, answer))
}

impl Served {
    /// Answers a request, or starts a task that will.
    pub(super) fn answer(&mut self, header: &Header, body: &[u8]) -> Result<(), DecodeError> {
        let request = header.request;
        let what = header.op.name();
        let local_only = matches!(
            header.op,
            Op::Attach | Op::Lease | Op::Release | Op::PutStaged | Op::Match | Op::Fetch
        );
        if local_only && self.local.is_none() {
            let reason = format!("{what} is for processes of the node's own host");
            self.fail(request, 0, Code::Denied, &reason);
            return Ok(());
        }
        match header.op {
            Op::Ping => {
                let slot = self.slot();
                self.outgoing.push_first(Op::Pong, request, slot);
            }
            Op::Lookup => self.lookup(request, &decode_body(what, body)?),
            Op::Read => self.read(request, &decode_body(what, body)?),
            Op::Reserve => self.reserve(request, &decode_body(what, body)?),
            Op::Commit => self.commit(request, &decode_body(what, body)?),
            Op::Cancel => self.cancel(request),
            Op::Attach => self.attach = Some(request),
            Op::Lease => self.lease(request, &decode_body(what, body)?),
            Op::Release => self.release(&decode_body(what, body)?),
            Op::PutStaged => self.put_staged(request, &decode_body(what, body)?),
            Op::Match => self.start_match(request, decode_body(what, body)?),
            Op::Fetch => self.start_fetch(request, decode_body(what, body)?),
            Op::Register => self.start_register(request, decode_body(what, body)?),
            Op::Hint => self.hint(request, &decode_body(what, body)?),
            Op::Hello
            | Op::HelloOk
            | Op::LookupOk
            | Op::ReadOk
            | Op::Granted
            | Op::Committed
            | Op::Pong
            | Op::Exists
            | Op::InProgress
            | Op::Failed
            | Op::Data
            | Op::Attached
            | Op::Leased
            | Op::Matched
            | Op::FetchDone
            | Op::Done
            | Op::Hinted => {
                return Err(DecodeError::Unknown {
                    what: "question",
                    value: u64::from(header.op.code()),
                });
            }
        }
        Ok(())
    }

    pub(super) fn name_of(&self, part: PartRef) -> PartName {
        let tenant = self.tenancy.as_ref().map(|tenancy| tenancy.tenant);
        PartName { tenant: tenant.unwrap_or_else(|| TenantName::default().id()), part }
    }

    /// Whether a call names as many keys as it may; if not, it is answered.
    fn check_keys(&mut self, request: u64, keys: &[BlockKey]) -> bool {
        let fits = keys.len() <= KEYS_LIMIT;
        if !fits {
            let reason = format!("{} keys, at most {KEYS_LIMIT} in a call", keys.len());
            self.fail(request, 0, Code::Limit, &reason);
        }
        fits
    }

    fn hint(&mut self, request: u64, hint: &ReuseHint) {
        if !self.check_keys(request, &hint.keys) {
            return;
        }
        let Some(tenant) = self.tenancy.as_ref().map(|tenancy| tenancy.tenant) else { return };
        let blocks = self.node.catalog().take_hint(tenant, hint);
        let slot = self.slot();
        self.outgoing.push(Op::Hinted, request, slot, &Hinted { blocks });
    }

    fn lookup(&mut self, request: u64, lookup: &Lookup) {
        if !self.check_keys(request, &lookup.keys) {
            return;
        }
        let of_key = |key: &BlockKey| -> TierSet {
            let part = PartRef { key: *key, layout: lookup.layout, part: lookup.part };
            self.node.catalog().tiers(&self.name_of(part))
        };
        let tiers = lookup.keys.iter().map(of_key).collect();
        let slot = self.slot();
        self.outgoing.push(Op::LookupOk, request, slot, &LookupOk { tiers });
    }

    fn read(&mut self, request: u64, read: &Read) {
        let name = self.name_of(read.part);
        match self.node.catalog().find(&name) {
            Some(Found::Here(part)) => match range_of(&self.node, &name, read, part) {
                Ok((answer, payload)) => {
                    let (slot, class) = (self.slot(), read.class);
                    self.node.count_sent(answer.len);
                    self.outgoing.push_payload(Op::ReadOk, request, slot, &answer, payload, class);
                }
                Err((code, reason)) => self.fail(request, 0, code, &reason),
            },
            Some(Found::OnSsd(_)) => self.start_read(request, read.clone(), name),
            None => {
                self.announce_absent(read);
                self.fail(request, 0, Code::Miss, MISS);
            }
        }
    }

    /// A peer or client was sent here in vain: masters are told, within bounds.
    fn announce_absent(&self, read: &Read) {
        let id = BlockId::of(&self.name_of(read.part));
        let model = ModelVersion { content: read.content, layout: id.layout };
        let directed = self.tenancy.as_ref().is_some_and(|tenancy| tenancy.role == Role::Node);
        if directed && self.node.may_announce_absent() {
            self.node.catalog().announce_absent(&id, model);
        }
    }

    fn reserve(&mut self, request: u64, reserve: &Reserve) {
        let Some(producer) = self.check_put(request, reserve) else { return };
        if self.puts.len() >= self.node.limits().requests as usize {
            let reason = "as many puts are open on this connection as may be";
            return self.fail(request, 0, Code::Busy, reason);
        }
        let (now, name) = (Instant::now(), self.name_of(reserve.part));
        match self.node.catalog().reserve(name, reserve, &producer, None, now) {
            Admission::Granted(put) => {
                let deadline = now + self.node.limits().write_deadline;
                self.puts.insert(request, OpenPut { put, deadline });
                self.done(Op::Granted, request);
            }
            other => self.refuse_put(request, other),
        }
    }

    fn check_put(&mut self, request: u64, reserve: &Reserve) -> Option<Arc<Producer>> {
        if let Err(error) = reserve.check() {
            self.fail(request, 0, Code::Limit, &error.to_string());
            return None;
        }
        if usize::from(reserve.part.part.0) >= larder_proto::fingerprint::PART_LIMIT {
            self.fail(request, 0, Code::Limit, "the part number is above the limit");
            return None;
        }
        self.tenancy.as_ref().map(|tenancy| Arc::clone(&tenancy.producer))
    }

    fn refuse_put(&mut self, request: u64, admission: Admission) {
        let slot = self.slot();
        match admission {
            Admission::Granted(_) => {}
            Admission::Exists(generation) => {
                self.outgoing.push(Op::Exists, request, slot, &Committed { generation });
            }
            Admission::InProgress { producer, since } => {
                let since_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
                let answer = InProgress { producer: ShortText::cut(&producer.name), since_ms };
                self.outgoing.push(Op::InProgress, request, slot, &answer);
            }
            Admission::Full => {
                let reason = "no room: everything that could go is in use";
                self.fail(request, 0, Code::Full, reason);
            }
            Admission::Draining => {
                self.fail(request, 0, Code::Draining, "the node is about to leave");
            }
        }
    }

    fn commit(&mut self, request: u64, commit: &Commit) {
        let in_time = |open: &OpenPut| Instant::now() < open.deadline;
        let Some(OpenPut { put, .. }) = self.puts.remove(&request).filter(in_time) else {
            return self.fail(request, 0, Code::Gone, "there is no such put, or its time was up");
        };
        let bytes = put.part_len() as u64;
        let committed = put.commit(Some(&commit.sums));
        self.committed(request, bytes, committed);
    }

    fn committed(&mut self, request: u64, bytes: u64, committed: Result<PartRead, CommitError>) {
        match committed {
            Ok(read) => {
                let generation = read.info().generation;
                self.node.count_received(bytes);
                let slot = self.slot();
                self.outgoing.push(Op::Committed, request, slot, &Committed { generation });
            }
            Err(error) => {
                let code = match &error {
                    CommitError::Damaged(_) => Code::Damaged,
                    CommitError::Incomplete { .. } | CommitError::Ring => Code::Limit,
                    CommitError::Revoked => Code::Gone,
                };
                self.fail(request, 0, code, &error.to_string());
            }
        }
    }

    fn cancel(&mut self, request: u64) {
        self.puts.remove(&request);
        self.outgoing.forget(request);
        if let Some(task) = self.running.remove(&request) {
            task.abort();
        }
    }

    fn lease(&mut self, request: u64, lease: &Lease) {
        let name = self.name_of(lease.part);
        let part = match self.node.catalog().find(&name) {
            Some(Found::Here(part)) => part,
            Some(Found::OnSsd(_)) => return self.start_lease(request, name),
            None => return self.fail(request, 0, Code::Miss, MISS),
        };
        let Some(local) = &self.local else { return };
        match self.node.lease(&local.reader, name, part, 0, Source::Local, self.node.id()) {
            Some(leased) => {
                let slot = self.slot();
                self.outgoing.push(Op::Leased, request, slot, &leased);
            }
            None => self.fail(request, 0, Code::Busy, TOO_MANY_LEASES),
        }
    }

    fn release(&mut self, release: &Release) {
        if let Some(local) = &self.local {
            self.node.leases().release(&local.reader, &release.leases);
        }
    }

    fn put_staged(&mut self, request: u64, staged: &PutStaged) {
        let Some(producer) = self.check_put(request, &staged.put) else { return };
        let name = self.name_of(staged.put.part);
        let staging = self.local.as_ref().and_then(|local| local.staging.as_ref());
        let Some(staging) = staging.map(|staging| &staging.memory) else {
            return self.fail(request, 0, Code::Denied, "attach first: there is no staging area");
        };
        let end = staged.staging_offset.checked_add(staged.put.len);
        if end.is_none_or(|end| end > staging.len() as u64) {
            let reason = format!(
                "range {}+{} is outside a staging area of {} bytes",
                staged.staging_offset,
                staged.put.len,
                staging.len()
            );
            return self.fail(request, 0, Code::Limit, &reason);
        }
        let catalog = self.node.catalog();
        match catalog.reserve(name, &staged.put, &producer, None, Instant::now()) {
            Admission::Granted(mut put) => {
                put.fill_from(staging, index(staged.staging_offset));
                let bytes = put.part_len() as u64;
                let committed = put.commit(None);
                self.committed(request, bytes, committed);
            }
            other => self.refuse_put(request, other),
        }
    }
}

/// An offset that was checked against a length in memory.
fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}
