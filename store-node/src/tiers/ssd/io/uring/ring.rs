//! The thread that owns the ring.

use super::{
    super::{Area, Completion, driver_gone, lock::FolderLock, progress::Cause, request::Request},
    files::FileTable,
    memory::Registered,
    queue::{Command, Shared, Why},
    slots::{After, SlotNumber, Slots},
};
use io_uring::{EnterFlags, IoUring, opcode, squeue::Entry, types};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{
    collections::VecDeque,
    io, mem,
    os::fd::{AsRawFd, BorrowedFd},
    sync::Arc,
};
use tracing::error;

/// Most requests in the kernel at a time, whatever is asked for.
const MAX_DEPTH: usize = 4096;
/// Names the read of the eventfd. No slot has this number.
const WAKE: u64 = u64::MAX;
/// How often in a row the kernel may refuse to take operations before the ring is given up: about five
/// seconds without memory.
const MAX_REFUSALS: u32 = 5000;
/// Between two of them.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// What a ring is made with.
#[derive(Debug)]
pub(super) struct Setup {
    /// Most requests in the kernel at a time.
    pub(super) depth: usize,
    /// Most bytes of an operation.
    pub(super) limit: usize,
    /// To be registered.
    pub(super) memory: Vec<Area>,
}

/// Sets the ring up, says so, and serves it until no handle and no request is left.
pub(super) fn run(
    shared: &Arc<Shared>,
    lock: Arc<FolderLock>,
    setup: Setup,
    ready: Completion<Option<String>>,
) {
    // Made first, so that it is dropped last, also in a panic.
    let _end = End { shared, lock: Some(lock) };
    let mut thread = match RingThread::set_up(shared, setup) {
        Ok((thread, not_locked)) => {
            let _ = ready.send(Ok(not_locked));
            thread
        }
        Err(error) => {
            let _ = ready.send(Err(error)); // Whoever started it waits.
            return;
        }
    };
    if let Err(error) = thread.serve() {
        // The memory of what the kernel has now is lost (see `Slots`); the rest is refused.
        if thread.worked {
            error!(%error, "the ring of an ssd folder failed, and all requests of the folder with it");
        }
        thread.give_up(&Why::new(error));
    }
}

/// What is done when the thread ends, however it ends.
struct End<'a> {
    shared: &'a Shared,
    lock: Option<Arc<FolderLock>>,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.shared.close(Why::new(driver_gone()));
        self.lock = None; // Before the end is told.
        self.shared.ended.tell();
    }
}

struct RingThread {
    shared: Arc<Shared>,
    /// Above the slots, so that it is dropped before the memory that they registered with it.
    ring: IoUring,
    slots: Slots,
    /// Requests for which there is no slot yet.
    waiting: VecDeque<Request>,
    files: FileTable,
    wake: Wake,
    /// Whether an operation was ever completed. If none was, whoever tried the ring out says why.
    worked: bool,
    /// Submissions in a row that the kernel refused.
    refusals: u32,
    commands: Vec<Command>,
    completions: Vec<(u64, i32)>,
    /// Requests that have left the kernel and were not answered yet.
    ended: Vec<(Request, io::Result<()>)>,
}

impl RingThread {
    fn set_up(shared: &Arc<Shared>, setup: Setup) -> io::Result<(Self, Option<String>)> {
        let Setup { depth, limit, memory } = setup;
        #[expect(clippy::cast_possible_truncation, reason = "at most 4096")]
        let depth = depth.clamp(1, MAX_DEPTH) as u32;
        // One entry more, for the eventfd: so a slot's operation always finds room.
        let ring = build(depth + 1)
            .map_err(|error| io::Error::new(error.kind(), format!("io_uring_setup: {error}")))?;
        let files = FileTable::of(&ring);
        let (memory, not_locked) = Registered::with(&ring, memory);
        let this = Self {
            shared: Arc::clone(shared),
            ring,
            slots: Slots::new(depth, limit, memory),
            waiting: VecDeque::new(),
            files,
            wake: Wake::default(),
            worked: false,
            refusals: 0,
            commands: Vec::new(),
            completions: Vec::new(),
            ended: Vec::new(),
        };
        Ok((this, not_locked))
    }

    fn serve(&mut self) -> io::Result<()> {
        loop {
            let stop = self.take_commands();
            self.fill_slots()?;
            self.answer()?;
            if stop && self.slots.is_empty() && !self.wake.armed {
                return Ok(());
            }
            // The write that told to stop ends the read that is armed, so the ring is empty at the end.
            if !stop && !self.wake.armed {
                let read = self.wake.arm(&self.shared);
                self.push(&read)?;
            }
            self.enter(1)?;
            self.complete()?;
        }
    }

    fn give_up(&mut self, why: &Why) {
        self.shared.close(why.clone());
        self.slots.give_up(why);
        for request in self.waiting.drain(..) {
            request.end(Err(why.error()));
        }
        for (request, result) in self.ended.drain(..) {
            request.end(result);
        }
    }

    fn fill_slots(&mut self) -> io::Result<()> {
        while self.slots.has_room()
            && let Some(request) = self.waiting.pop_front()
        {
            self.start(request)?;
        }
        Ok(())
    }

    /// Answers what has ended. The disk gets its next work before: an answer wakes somebody, who may well take
    /// the processor from this thread.
    fn answer(&mut self) -> io::Result<()> {
        if self.ended.is_empty() {
            return Ok(());
        }
        if !self.ring.submission().is_empty() {
            self.enter(0)?;
        }
        for (request, result) in self.ended.drain(..) {
            request.end(result);
        }
        Ok(())
    }

    fn take_commands(&mut self) -> bool {
        let stop = self.shared.take(&mut self.commands);
        for command in self.commands.drain(..) {
            match command {
                Command::Start(request) => self.waiting.push_back(request),
                Command::Forget(place) => self.files.forget(&self.ring, place),
            }
        }
        stop
    }

    fn start(&mut self, request: Request) -> io::Result<()> {
        let place = self.files.place(&self.ring, &request.file, &self.shared);
        let slot = self.slots.put(request, place);
        self.push_operation(slot)
    }

    fn push_operation(&mut self, slot: SlotNumber) -> io::Result<()> {
        self.shared.counts.operation();
        let operation = self.slots.operation(slot);
        self.push(&operation)
    }

    fn push(&mut self, entry: &Entry) -> io::Result<()> {
        // SAFETY: what the entry names stays valid until its completion: the memory, vector and file of an
        // operation belong to its slot, which lets go of them only in `Slots::completed` (and never, if that
        // does not come); the buffer of the eventfd belongs to `Wake`, which does likewise.
        #[expect(unsafe_code, reason = "the kernel is given memory to use")]
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.map_err(|_| io::Error::other("more operations than slots"))
    }

    /// Hands over all new operations and waits for so many completions.
    fn enter(&mut self, completions: usize) -> io::Result<()> {
        if !self.ring.submission().is_empty() {
            self.shared.counts.submission();
        }
        match self.submit(completions) {
            Ok(_) => {
                self.refusals = 0;
                Ok(())
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR) => {
                    self.shared.counts.again(Cause::Retry);
                    Ok(())
                }
                Some(libc::EAGAIN | libc::EBUSY) if self.refusals < MAX_REFUSALS => {
                    self.shared.counts.again(Cause::Retry);
                    self.refusals += 1;
                    self.make_progress()
                }
                _ => Err(error),
            },
        }
    }

    fn submit(&mut self, completions: usize) -> io::Result<usize> {
        #[cfg(test)]
        if let Some(fault) = self.shared.faults.lock().pop_front() {
            return Err(io::Error::from_raw_os_error(fault));
        }
        self.ring.submit_and_wait(completions)
    }

    /// Lets the kernel finish what it has, after it refused to take more: that gives memory back.
    fn make_progress(&mut self) -> io::Result<()> {
        let flags = EnterFlags::GETEVENTS.bits();
        // SAFETY: nothing is submitted and nothing waited for, so no memory is named.
        #[expect(unsafe_code, reason = "a raw system call, without a pointer")]
        let entered = unsafe { self.ring.submitter().enter::<libc::sigset_t>(0, 0, flags, None) };
        match entered.map_err(|error| (error.raw_os_error(), error)) {
            Ok(_) | Err((Some(libc::EINTR | libc::EAGAIN | libc::EBUSY), _)) => {}
            Err((_, error)) => return Err(error),
        }
        if !self.ring.completion().is_empty() {
            return Ok(());
        }
        // SAFETY: the ring, and so its descriptor, outlives the borrow.
        #[expect(unsafe_code, reason = "the ring shows its descriptor as a number only")]
        let fd = unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) };
        let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&PAUSE)); // Only a pause.
        Ok(())
    }

    fn complete(&mut self) -> io::Result<()> {
        let mut completions = mem::take(&mut self.completions);
        let arrived = self.ring.completion();
        completions.extend(arrived.map(|entry| (entry.user_data(), entry.result())));
        for (user_data, result) in completions.drain(..) {
            if user_data == WAKE {
                self.wake.completed(result)?;
                continue;
            }
            self.worked = true;
            match self.slots.completed(user_data, result, &self.shared.counts) {
                After::Again(slot) => self.push_operation(slot)?,
                After::Ended(request, result) => self.ended.push((request, result)),
                After::Nothing => {}
            }
        }
        self.completions = completions;
        Ok(())
    }
}

/// The read of the eventfd.
#[derive(Default)]
struct Wake {
    /// Whether the kernel has the read.
    armed: bool,
    buffer: Box<[u8; 8]>,
}

impl Wake {
    #[expect(clippy::cast_possible_truncation, reason = "8 bytes")]
    fn arm(&mut self, shared: &Shared) -> Entry {
        self.armed = true;
        let (base, len) = (self.buffer.as_mut_ptr(), self.buffer.len() as u32);
        let read = opcode::Read::new(types::Fd(shared.wake.as_raw_fd()), base, len);
        read.build().user_data(WAKE)
    }

    fn completed(&mut self, result: i32) -> io::Result<()> {
        self.armed = false;
        match -result {
            libc::EINTR | libc::EAGAIN => Ok(()),
            error if error > 0 => Err(io::Error::from_raw_os_error(error)),
            _ => Ok(()),
        }
    }
}

impl Drop for Wake {
    fn drop(&mut self) {
        if self.armed {
            mem::forget(mem::take(&mut self.buffer)); // The kernel may still write to it.
        }
    }
}

/// A ring in the cheapest mode that the kernel has: completions are handled when this thread asks for them
/// (6.1), or at its next system call (5.19), or whenever they come.
fn build(entries: u32) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    match builder.setup_single_issuer().setup_defer_taskrun().build(entries) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
        built => return built,
    }
    match IoUring::builder().setup_coop_taskrun().build(entries) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries),
        built => built,
    }
}
