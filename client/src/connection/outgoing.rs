//! Frames on their way out: bounded by what their owners may have open, sent by class.

use super::Socket;
use bytes::Bytes;
use larder_proto::{
    frame::{Class, Empty, HEADER_LEN, Header, Op, PAYLOAD_LIMIT, flags},
    wire::Wire,
};
use std::{
    collections::VecDeque,
    io::{self, IoSlice},
};

/// Slices of one vectored write.
const SLICES: usize = 32;
/// Bytes of one write: what the reference of the design sends at once, and little enough that the
/// receiver sums it while it is in its cache.
pub(super) const WRITE_BYTES: usize = 256 << 10;
/// What a write may hold besides payload: the small frames behind a full one go out with it, since a write
/// of their own would wake the receiver once more.
const HEAD_BYTES: usize = 4 << 10;
/// Payload of one frame when several requests share the connection: short enough that an urgent small
/// answer never waits for a long one.
const FRAME_BYTES: usize = 1 << 20;

const _: () = assert!(FRAME_BYTES <= PAYLOAD_LIMIT as usize);

/// One frame: header and body in one buffer, payload beside it.
#[derive(Debug)]
struct Frame {
    head: Vec<u8>,
    payload: Bytes,
    sent: usize,
}

impl Frame {
    fn left(&self) -> usize {
        self.head.len() + self.payload.len() - self.sent
    }

    fn slices(&self) -> (&[u8], &[u8]) {
        let head_sent = self.sent.min(self.head.len());
        (&self.head[head_sent..], &self.payload[self.sent - head_sent..])
    }
}

/// A queue of frames for one connection.
///
/// Classes are weighted 8 : 4 : 2 : 1 by frame, so that demand comes first and nobody starves.
#[derive(Debug, Default)]
pub struct Outgoing {
    /// Chosen, in the order in which their bytes go out.
    chosen: VecDeque<Frame>,
    chosen_bytes: usize,
    waiting: [VecDeque<Frame>; 4],
    turn: usize,
    sent_bytes: u64,
}

/// Which class goes at each turn, if it has frames.
const TURNS: [usize; 15] = [0, 1, 0, 2, 0, 1, 0, 3, 0, 1, 0, 2, 0, 1, 0];

impl Outgoing {
    /// Whether nothing is waiting.
    pub fn is_empty(&self) -> bool {
        self.chosen.is_empty() && self.waiting.iter().all(VecDeque::is_empty)
    }

    /// Frames that are waiting.
    pub fn len(&self) -> usize {
        self.chosen.len() + self.waiting.iter().map(VecDeque::len).sum::<usize>()
    }

    /// A frame without payload.
    pub fn push(&mut self, op: Op, request: u64, tenant_slot: u32, body: &impl Wire) {
        self.push_payload(op, request, tenant_slot, body, Bytes::new(), Class::Demand);
    }

    /// A message with a payload, in as many frames as it needs: the first with `op` and `body`, the rest
    /// as `Data`.
    pub fn push_payload(
        &mut self,
        op: Op,
        request: u64,
        tenant_slot: u32,
        body: &impl Wire,
        payload: Bytes,
        class: Class,
    ) {
        let mut offset = 0;
        let mut pieces = payload.chunks(FRAME_BYTES).map(<[u8]>::len).peekable();
        let first = pieces.next().unwrap_or(0);
        let header = Header {
            op,
            flags: if pieces.peek().is_none() { flags::LAST } else { 0 },
            request,
            tenant_slot,
            body_len: 0,
            payload_len: 0,
            payload_offset: 0,
        };
        self.push_frame(header, body, payload.slice(..first), class);
        offset += first;
        while let Some(len) = pieces.next() {
            let piece = payload.slice(offset..offset + len);
            let last = pieces.peek().is_none();
            self.push_piece(request, tenant_slot, piece, offset, last, class);
            offset += len;
        }
    }

    /// One piece of a longer payload, as `Data`: `offset` is where it lies in that, and `last` that it is
    /// its end.
    pub(super) fn push_piece(
        &mut self,
        request: u64,
        tenant_slot: u32,
        piece: Bytes,
        offset: usize,
        last: bool,
        class: Class,
    ) {
        let header = Header {
            op: Op::Data,
            flags: if last { flags::LAST } else { 0 },
            request,
            tenant_slot,
            body_len: 0,
            payload_len: 0,
            payload_offset: offset as u64,
        };
        self.push_frame(header, &Empty {}, piece, class);
    }

    /// A frame; `header` gets the lengths of what follows it.
    fn push_frame(&mut self, header: Header, body: &impl Wire, payload: Bytes, class: Class) {
        let mut head = vec![0; HEADER_LEN];
        body.put(&mut head);
        let header = Header {
            body_len: u32::try_from(head.len() - HEADER_LEN).unwrap_or(u32::MAX),
            payload_len: u32::try_from(payload.len()).unwrap_or(u32::MAX),
            ..header
        };
        head[..HEADER_LEN].copy_from_slice(&header.encode());
        self.waiting[usize::from(class.code())].push_back(Frame { head, payload, sent: 0 });
    }

    /// Takes back payload of a request that is not yet being sent. Frames without payload still go out:
    /// an answer may hold a lease, which only its receiver can release.
    pub fn forget(&mut self, request: u64) {
        let of_request = request.to_le_bytes();
        for queue in &mut self.waiting {
            queue.retain(|frame| {
                frame.payload.is_empty() || frame.head.get(16..24) != Some(&of_request[..])
            });
        }
    }

    /// A frame without payload that goes out before all that wait: for pings and their answers.
    pub fn push_first(&mut self, op: Op, request: u64, tenant_slot: u32) {
        let head = Header::new(op, request, tenant_slot, 0).encode().to_vec();
        // Never into the middle of a frame whose bytes have begun to go out.
        let begun = self.chosen.front().is_some_and(|frame| frame.sent > 0);
        self.chosen_bytes += head.len();
        self.chosen.insert(usize::from(begun), Frame { head, payload: Bytes::new(), sent: 0 });
    }

    /// Bytes that the socket has taken so far.
    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Writes until everything is gone or the socket takes no more; whether everything is gone. At most
    /// `budget` bytes, so that one connection does not keep its thread for itself.
    pub fn flush(&mut self, socket: &Socket, mut budget: usize) -> io::Result<bool> {
        loop {
            self.choose();
            if self.chosen.is_empty() {
                return Ok(true);
            }
            let mut slices = [IoSlice::new(&[]); SLICES];
            // Heads do not count: a payload of a whole number of writes takes that many.
            let (mut used, mut room) = (0, WRITE_BYTES);
            for frame in &self.chosen {
                let (head, payload) = frame.slices();
                if used > SLICES - 2 || (room == 0 && !payload.is_empty()) {
                    break;
                }
                let now = &payload[..payload.len().min(room)];
                room -= now.len();
                for piece in [head, now] {
                    if !piece.is_empty() {
                        slices[used] = IoSlice::new(piece);
                        used += 1;
                    }
                }
                if now.len() < payload.len() {
                    break;
                }
            }
            match socket.try_write(&slices[..used]) {
                Ok(sent) => {
                    self.sent(sent);
                    budget = budget.saturating_sub(sent);
                    if budget == 0 {
                        return Ok(self.is_empty());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn choose(&mut self) {
        while self.chosen_bytes < WRITE_BYTES + HEAD_BYTES {
            if self.waiting[1..].iter().all(VecDeque::is_empty) {
                // Nearly always: demand alone, which needs no turns.
                let Some(frame) = self.waiting[0].pop_front() else { return };
                self.chosen_bytes += frame.left();
                self.chosen.push_back(frame);
                continue;
            }
            let with_frames = |class: &usize| !self.waiting[*class].is_empty();
            let turns = TURNS.iter().cycle().skip(self.turn).take(TURNS.len()).copied();
            let Some((skipped, class)) = turns.enumerate().find(|(_, class)| with_frames(class))
            else {
                return;
            };
            self.turn = (self.turn + skipped + 1) % TURNS.len();
            if let Some(frame) = self.waiting[class].pop_front() {
                self.chosen_bytes += frame.left();
                self.chosen.push_back(frame);
            }
        }
    }

    fn sent(&mut self, mut bytes: usize) {
        self.sent_bytes += bytes as u64;
        self.chosen_bytes -= bytes;
        while let Some(frame) = self.chosen.front_mut() {
            let now = bytes.min(frame.left());
            frame.sent += now;
            bytes -= now;
            if frame.left() > 0 {
                return;
            }
            self.chosen.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(out: &mut Outgoing, request: u64, len: usize, class: Class) {
        out.push_payload(Op::ReadOk, request, 0, &Empty {}, vec![0; len].into(), class);
    }

    fn order(out: &mut Outgoing) -> Vec<u64> {
        let mut order = Vec::new();
        loop {
            out.choose();
            let Some(frame) = out.chosen.front() else { return order };
            let header: [u8; HEADER_LEN] = frame.head[..HEADER_LEN].try_into().unwrap();
            order.push(Header::decode(&header).unwrap().request);
            out.sent(out.chosen[0].left());
        }
    }

    #[test]
    fn demand_overtakes_but_does_not_starve_the_other_classes() {
        let mut out = Outgoing::default();
        (0..20).for_each(|_| push(&mut out, 3, FRAME_BYTES, Class::Drain));
        (0..20).for_each(|_| push(&mut out, 0, FRAME_BYTES, Class::Demand));
        let order = order(&mut out);
        assert_eq!(order.len(), 40);
        assert_eq!(order[0], 0, "demand first");
        let drained = order[..16].iter().filter(|request| **request == 3).count();
        assert!((1..=3).contains(&drained), "{order:?}");
    }

    #[test]
    fn a_long_payload_goes_out_in_frames_with_rising_offsets() {
        let mut out = Outgoing::default();
        push(&mut out, 1, 2 * FRAME_BYTES + 7, Class::Demand);
        let frames: Vec<Header> = out.waiting[0]
            .iter()
            .map(|frame| Header::decode(frame.head[..HEADER_LEN].try_into().unwrap()).unwrap())
            .collect();
        let seen: Vec<_> =
            frames.iter().map(|h| (h.op, h.payload_offset, h.payload_len, h.is_last())).collect();
        let full = u32::try_from(FRAME_BYTES).unwrap();
        let at = u64::from(full);
        assert_eq!(
            seen,
            [
                (Op::ReadOk, 0, full, false),
                (Op::Data, at, full, false),
                (Op::Data, 2 * at, 7, true),
            ]
        );
    }

    #[test]
    fn an_urgent_frame_goes_between_frames_and_never_into_one() {
        let mut out = Outgoing::default();
        push(&mut out, 1, 100, Class::Demand);
        push(&mut out, 2, 100, Class::Demand);
        out.choose();
        out.sent(10);
        out.push_first(Op::Ping, 9, 0);
        assert_eq!(order(&mut out), [1, 9, 2]);
    }

    #[test]
    fn a_forgotten_request_sends_no_more_payload() {
        let mut out = Outgoing::default();
        push(&mut out, 1, 10, Class::Demand);
        push(&mut out, 2, 10, Class::Prefetch);
        out.push(Op::Leased, 1, 0, &Empty {});
        out.forget(1);
        assert_eq!(order(&mut out), [1, 2], "the lease still has to be told");
    }
}
