//! Machines that forbid things: small file systems, file systems without direct I/O, no io_uring.

use super::{
    super::{DiskFolder, DiskOptions, DriverChoice, DriverKind, Folder, PAGE},
    bed::{content, filled, pattern},
};
use std::{ffi::CString, io, path::Path};

/// Runs `test` on a file system of its own, in a mount namespace that ends with its thread. Where mounting is
/// not permitted it is skipped, and that is said.
fn on_own_mount(kind: &str, options: &str, test: impl FnOnce(&Path) + Send) {
    let dir = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        let done = scope.spawn(|| match mount(kind, options, dir.path()) {
            Ok(()) => test(dir.path()),
            Err(error) => println!("skipped: no {kind} can be mounted here: {error}"),
        });
        done.join().unwrap();
    });
}

#[expect(unsafe_code, reason = "mounts have no safe wrapper among our crates")]
fn mount(kind: &str, options: &str, on: &Path) -> io::Result<()> {
    let text = |text: &str| CString::new(text).unwrap();
    let (none, root, kind, options) = (text("none"), text("/"), text(kind), text(options));
    let on = text(on.to_str().unwrap());
    let check = |rc| if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: all pointers are of strings that live until the end of this function. The namespace is this
    // thread's alone.
    unsafe {
        check(libc::unshare(libc::CLONE_NEWNS))?;
        let private = libc::MS_REC | libc::MS_PRIVATE;
        check(libc::mount(
            none.as_ptr(),
            root.as_ptr(),
            std::ptr::null(),
            private,
            std::ptr::null(),
        ))?;
        check(libc::mount(none.as_ptr(), on.as_ptr(), kind.as_ptr(), 0, options.as_ptr().cast()))
    }
}

#[test]
fn a_file_longer_than_the_file_system_is_refused_and_leaves_nothing() {
    on_own_mount("tmpfs", "size=1m", |path| {
        let folder = DiskFolder::open(path, &DiskOptions::default()).unwrap();
        let before = folder.space().unwrap();
        let error = folder.create("segment", 2 << 20).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{error}");
        assert_eq!(folder.list().unwrap(), []);
        assert_eq!(folder.space().unwrap(), before);
        filled(&folder, "segment", 1, 64 * PAGE);
    });
}

#[test]
fn a_folder_on_a_full_file_system_opens_again_and_is_used_once_there_is_room() {
    on_own_mount("tmpfs", "size=1m", |path| {
        let folder = DiskFolder::open(path, &DiskOptions::default()).unwrap();
        filled(&folder, "segment", 2, 64 * PAGE);
        let ended = folder.ended();
        drop(folder);
        ended.wait().unwrap();
        // Somebody else takes the rest.
        let room = usize::try_from(rustix::fs::statvfs(path).unwrap().f_bavail).unwrap() * PAGE;
        std::fs::write(path.join("foreign"), vec![1; room]).unwrap();
        assert!(std::fs::write(path.join("more"), [1; PAGE]).is_err(), "it is full");

        let folder = DiskFolder::open(path, &DiskOptions::default()).unwrap();
        assert!(content(&*folder.open("segment").unwrap()) == pattern(2, 64 * PAGE));
        assert_eq!(
            folder.create("new", 8 * PAGE as u64).unwrap_err().kind(),
            io::ErrorKind::StorageFull
        );
        std::fs::remove_file(path.join("foreign")).unwrap();
        filled(&folder, "new", 3, 8 * PAGE);
    });
}

/// It has neither direct I/O nor `fallocate`.
#[test]
fn a_file_system_without_direct_io_is_used_without_and_that_is_known() {
    on_own_mount("ramfs", "", |path| {
        let folder = DiskFolder::open(path, &DiskOptions::default()).unwrap();
        let in_use = folder.driver();
        assert_eq!((in_use.kind, in_use.direct), (DriverKind::Threads, false), "{in_use:?}");
        assert_eq!(in_use.refused.len(), 2, "{in_use:?}");
        assert!(
            in_use.refused[1].starts_with("threads with direct I/O: Invalid argument"),
            "{in_use:?}"
        );
        let file = folder.create("segment", 300 * PAGE as u64).unwrap();
        assert!(content(&*file).iter().all(|byte| *byte == 0));
        filled(&folder, "other", 4, 300 * PAGE);
    });
}

#[test]
fn a_choice_that_cannot_be_had_is_an_error_that_says_why() {
    on_own_mount("ramfs", "", |path| {
        let options = DiskOptions { driver: DriverChoice::IoUring, ..DiskOptions::default() };
        let error = DiskFolder::open(path, &options).unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
        assert!(error.contains("io_uring with direct I/O: "), "{error}");
        DiskFolder::open(path, &DiskOptions::default()).unwrap(); // Nothing is left locked.
    });
}
