//! Changes that this client decides alone, and what it asks the server for so that it can.
//!
//! A change that lacks something (write leases, what a name means, numbers, space) waits until the
//! server has answered that, and is decided then. What cannot be decided here goes to the server,
//! and waits for its answer.

use std::sync::{Arc, Weak};

use crate::rt::Mutex;
use ferry_fs::inprocess::FromReply;
use ferry_fs::{Answer, Cx, Errno, Ino, ROOT, Stop};

use super::cache::CacheVersion;
use super::change::{Key, Nobody, Pending, Waiter};
use super::left::Came;
use super::model::{Made, Not};
use super::names::Name;
use super::remote::{RemoteFs, caller, number};
use super::waiting::Finish;
use crate::codec::List;
use crate::message::{
    Acknowledged, BATCH_MAX, Caller, Effect, Info, LEASED_FOUND, Op, Outcome, Use,
};

/// A change asks for what it lacks so often, then the server decides it.
const QUESTIONS_MAX: u32 = 4;

/// What was decided.
enum Decision {
    /// The answer; `true`: to be given when there is room in the window.
    Made(Outcome, bool),
    Fails(Errno),
    /// This is lacking.
    Ask(Op),
    /// The server decides.
    Wait,
}

impl RemoteFs {
    /// A change that is decided here if it can be.
    pub(super) fn change<T: FromReply>(&self, cx: &Cx<'_>, op: Op, finish: Finish) -> Answer<T> {
        let unfit = Stop::Errno(Errno(libc::EPROTO));
        match self.left.take(number(cx)) {
            None => {}
            Some(Came::To(outcome)) => return T::from_reply(finish(self, outcome)?).ok_or(unfit),
            Some(Came::Waits(seq)) => {
                let parked = self.park(cx, Op::Nothing {}, (finish, None), None);
                self.link.wait_for(seq, Arc::clone(&parked.waiter));
                parked.waiter.moved(Key::Change(seq));
                return Err(Stop::Parked);
            }
        }
        let mut op = op;
        match self.decide(cx, &mut op) {
            Decision::Made(outcome, false) => T::from_reply(finish(self, outcome)?).ok_or(unfit),
            Decision::Made(outcome, true) => {
                let parked = self.park(cx, Op::Nothing {}, (finish, None), None);
                self.link.hold(parked.waiter, outcome);
                Err(Stop::Parked)
            }
            Decision::Fails(errno) => Err(errno.into()),
            Decision::Ask(what) => {
                let parked = self.park(cx, op, (finish, None), None);
                self.ask(what, Some((parked, 1)));
                Err(Stop::Parked)
            }
            Decision::Wait => self.send(cx, op, finish),
        }
    }

    fn decide(&self, cx: &Cx<'_>, op: &mut Op) -> Decision {
        self.decide_as((&caller(cx), number(cx)), op)
    }

    /// Of a caller, and the transport's number of the request.
    fn decide_as(&self, (caller, request): (&Caller, u64), op: &mut Op) -> Decision {
        // They stay what they are, whatever is filled in below.
        let Info { is_early, cost, effect, .. } = op.info();
        if !is_early {
            return Decision::Wait;
        }
        let files = self.files_of(op);
        let now = self.cache.now();
        let mut cache = self.cache.lock();
        let may = cache.asynchronous && cache.is_valid(now) && cache.reservation.is_recorded();
        let Some(mut early_acks) = self.link.early_acks().filter(|_| may) else {
            return Decision::Wait;
        };
        if early_acks.is_lossy() && self.tables.lock().refuses(op, &files) {
            return Decision::Fails(Errno(libc::EIO));
        }
        // No times go back, however exactly the server's clock is known here.
        let changed = cache.changed_at(op, files.first().map(|(_, ino)| *ino));
        let at = cache.server_time(now).max(changed);
        if !cache.reservation.has(cost) {
            return cache.reservation.lacks(cost, now).map_or(Decision::Wait, Decision::Ask);
        }
        let number = cache.reservation.number();
        let made = match &mut *op {
            // It changes nothing: any lease says that the server knows the inode. Only a write
            // lease says that it may be opened for writing.
            Op::Open { ino, flags, kill_suidgid: false, .. } if *flags & libc::O_TRUNC == 0 => {
                let reads = *flags & libc::O_ACCMODE == libc::O_RDONLY;
                let knows = cache.model.holds(*ino) || reads && cache.is_leased(*ino);
                if !knows {
                    return Decision::Wait;
                }
                Ok(Made { outcome: Outcome::Done {}, touched: vec![*ino], fresh: false })
            }
            op => cache.model.make(op, caller, at, number, files.first().map(|(_, ino)| *ino)),
        };
        let Made { outcome, touched, fresh } = match made {
            Ok(made) if made.touched.is_empty() => return Decision::Made(made.outcome, false),
            Ok(made) => made,
            Err(Not::Possible(errno)) => return Decision::Fails(Errno(errno)),
            Err(Not::Named(parent, name)) => return Decision::Ask(Op::Lookup { parent, name }),
            Err(Not::Held(mut inos)) => {
                let children =
                    op.info().names().filter_map(|(dir, name)| match cache.name(dir, name) {
                        Name::Is(ino) if !cache.model.holds(ino) => Some(ino),
                        _ => None,
                    });
                inos.extend(children);
                inos.sort_unstable();
                inos.dedup();
                if cache.may_ask(&inos, now) {
                    return Decision::Ask(Op::Lease { inodes: List(inos) });
                }
                return Decision::Wait;
            }
            Err(Not::Known) => return Decision::Wait,
        };
        cache.reservation.pay(cost, fresh);
        if effect != Effect::Nothing {
            cache.decided(&touched);
        }
        let mut waiter: Arc<dyn Waiter> = Arc::new(Nobody);
        if let Outcome::Entry { known: Some(known) } = &outcome {
            self.tables.lock().expect(known.attr.ino);
            waiter = Arc::new(Named { fs: self.this.clone(), ino: known.attr.ino });
        }
        let ino = number.filter(|_| fresh).unwrap_or(0);
        let op = std::mem::replace(op, Op::Nothing {});
        let pending = Pending::acknowledged(*caller, op, waiter, Acknowledged { at, ino });
        let told = Some(Box::new(outcome.clone()));
        let full =
            early_acks.acknowledge(Pending { touched, files, request, outcome: told, ..pending });
        let (wants, surplus) = (cache.reservation.wants(now), cache.model.surplus());
        drop(early_acks);
        drop(cache);
        wants.into_iter().for_each(|op| self.ask(op, None));
        self.link.give_back(&surplus);
        Decision::Made(outcome, full)
    }

    /// Asks for what a change lacks, which then goes on; or for supplies.
    fn ask(&self, op: Op, parked: Option<(Pending, u32)>) {
        let question = match &op {
            Op::Lease { inodes } => Some(self.cache.lock().ask(&inodes.0)),
            _ => None,
        };
        let (version, asked) = (self.cache.version(), op.clone());
        let waiter = Asked {
            fs: self.this.clone(),
            op: asked,
            question,
            version,
            parked: Mutex::new(parked),
        };
        let caller = Default::default();
        self.link.request(Pending::new(caller, op, Arc::new(waiter)));
    }

    /// Requests inode numbers and space for early acknowledgements to come.
    pub(super) fn ask_for_supplies(&self) {
        if !self.link.is_read_only() {
            let mut cache = self.cache.lock();
            if !cache.asynchronous {
                return;
            }
            let wants = cache.reservation.wants(self.cache.now());
            drop(cache);
            wants.into_iter().for_each(|op| self.ask(op, None));
        }
    }

    /// Something that a change lacked was answered.
    fn resume(&self, parked: Pending, questions: u32) {
        if parked.waiter.is_interrupted() {
            return;
        }
        if self.link.relies_on_lost_lock(&parked) {
            return parked.waiter.fail(Errno(libc::EIO));
        }
        let mut parked = parked;
        let asker = (parked.caller, parked.request);
        match self.decide_as((&asker.0, asker.1), &mut parked.op) {
            Decision::Made(outcome, true) => self.link.hold(parked.waiter, outcome),
            Decision::Made(outcome, false) => parked.waiter.answer(outcome, 0),
            Decision::Fails(errno) => parked.waiter.fail(errno),
            Decision::Ask(what) if questions < QUESTIONS_MAX => {
                self.ask(what, Some((parked, questions + 1)))
            }
            Decision::Ask(what) => {
                self.cache.lock().reservation.not_asked(&what);
                self.send_parked(parked);
            }
            Decision::Wait => self.send_parked(parked),
        }
    }

    /// The inodes of the open files that an operation names.
    pub(super) fn files_of(&self, op: &Op) -> Vec<(u64, Ino)> {
        let mut handles = op.info().handles().peekable();
        if handles.peek().is_none() {
            return Vec::new();
        }
        let tables = self.tables.lock();
        let of = |fh: u64| tables.handles.get(&fh).map(|handle| (fh, handle.ino));
        handles.filter_map(of).collect()
    }

    /// A change was not made, for another session has leases: they are asked for, and it is sent
    /// again with them.
    pub(super) fn borrow(&self, change: Pending) {
        let mut inos = change.touched.clone();
        let info = change.op.info();
        inos.extend(info.inodes_with(Use::Read));
        inos.extend(change.files.iter().map(|(_, ino)| *ino));
        let names: Vec<(Ino, Vec<u8>)> =
            info.names().map(|(dir, name)| (dir, name.to_vec())).collect();
        self.borrow_next(Borrowing { change, inos, names, looked_up: Vec::new(), asks: false });
    }

    /// What the names mean is asked first, then the leases.
    fn borrow_next(&self, mut borrowing: Borrowing) {
        let op = match borrowing.names.pop() {
            Some((parent, name)) => Op::Lookup { parent, name },
            None => {
                borrowing.asks = true;
                borrowing.inos.sort_unstable();
                borrowing.inos.dedup();
                borrowing.inos.truncate(BATCH_MAX);
                Op::Lease { inodes: List(borrowing.inos.clone()) }
            }
        };
        let waiter = Borrower { fs: self.this.clone(), borrowing: Mutex::new(Some(borrowing)) };
        self.link.request(Pending::new(Default::default(), op, Arc::new(waiter)));
    }

    /// Counts a lookup that the kernel will not hear of.
    fn count_lookup(&self, outcome: &Outcome) -> Option<Ino> {
        let Outcome::Entry { known: Some(known) } = outcome else { return None };
        if known.attr.ino != ROOT {
            self.tables.lock().learn(known);
        }
        Some(known.attr.ino)
    }

    /// Takes such lookups back.
    fn forget_lookups(&self, inos: impl IntoIterator<Item = Ino>) {
        inos.into_iter().filter(|ino| *ino != ROOT).for_each(|ino| self.forget_known(ino, 1));
    }
}

/// The answer to an early-acknowledged change will name an inode.
pub(super) struct Named {
    pub(super) fs: Weak<RemoteFs>,
    pub(super) ino: Ino,
}

impl Waiter for Named {
    fn answer(&self, outcome: Outcome, _leased: u8) {
        if let (Some(fs), Outcome::Entry { known: Some(known) }) = (self.fs.upgrade(), outcome) {
            fs.confirm(self.ino, Some(&known));
        }
    }

    fn fail(&self, _errno: Errno) {}
}

/// Something is lacking, of a change perhaps.
struct Asked {
    fs: Weak<RemoteFs>,
    op: Op,
    question: Option<u64>,
    version: CacheVersion,
    parked: Mutex<Option<(Pending, u32)>>,
}

impl Waiter for Asked {
    fn answer(&self, outcome: Outcome, leased: u8) {
        let Some(fs) = self.fs.upgrade() else { return };
        match (&self.op, &outcome) {
            (Op::Lease { .. }, outcome) => {
                let held =
                    if let Outcome::Leases { held } = outcome { held.0.as_slice() } else { &[] };
                let now = fs.cache.now();
                let refused = match self.question {
                    Some(question) => {
                        let mut cache = fs.cache.lock();
                        cache.granted(question, held, now)
                    }
                    None => Vec::new(),
                };
                fs.link.give_back(&refused);
            }
            (Op::Lookup { parent, name }, Outcome::Entry { known }) => {
                let mut surplus = Vec::new();
                if fs.cache.holds(*parent) {
                    surplus = fs.cache.learn_name(self.version, *parent, name, known.as_ref());
                }
                if let Some(known) = known
                    && leased & LEASED_FOUND != 0
                {
                    surplus.extend(fs.cache.learn_attr(self.version, &known.attr));
                }
                fs.link.give_back(&surplus);
                fs.forget_lookups(fs.count_lookup(&outcome));
            }
            (Op::Numbers {}, Outcome::Numbers { numbers }) => {
                fs.link.numbered(*numbers);
                fs.cache.lock().reservation.take_numbers(numbers.first, numbers.count);
            }
            (
                Op::Reserve { bytes, inodes },
                Outcome::Space { bytes: more, inodes: more_inodes },
            ) => {
                let (asked, given) = ((*bytes, *inodes), (*more, *more_inodes));
                fs.cache.lock().reservation.take_space(asked, given, fs.cache.now());
                fs.ask_for_supplies();
            }
            (Op::Lookup { .. }, _) => {}
            (op, _) => fs.cache.lock().reservation.refused(op, fs.cache.now()),
        }
        let parked = self.parked.lock().take();
        if let Some((parked, questions)) = parked {
            fs.resume(parked, questions);
        }
    }

    fn fail(&self, errno: Errno) {
        if let Some(fs) = self.fs.upgrade() {
            let now = fs.cache.now();
            match (self.question, &self.op) {
                (Some(question), _) => fs.cache.unanswered(question),
                (None, Op::Lookup { .. }) => {}
                (None, op) => fs.cache.lock().reservation.refused(op, now),
            }
        }
        let parked = self.parked.lock().take();
        if let Some((parked, _)) = parked {
            parked.waiter.fail(errno);
        }
    }
}

/// A change for which leases are taken.
struct Borrowing {
    change: Pending,
    inos: Vec<Ino>,
    names: Vec<(Ino, Vec<u8>)>,
    /// What the names mean. The session must know it until the request for leases is answered.
    looked_up: Vec<Ino>,
    /// The leases are asked for.
    asks: bool,
}

struct Borrower {
    fs: Weak<RemoteFs>,
    borrowing: Mutex<Option<Borrowing>>,
}

impl Waiter for Borrower {
    fn answer(&self, outcome: Outcome, _leased: u8) {
        let taken = self.borrowing.lock().take();
        let (Some(fs), Some(mut borrowing)) = (self.fs.upgrade(), taken) else { return };
        if !borrowing.asks {
            let found = fs.count_lookup(&outcome);
            borrowing.inos.extend(found);
            borrowing.looked_up.extend(found);
            return fs.borrow_next(borrowing);
        }
        let Borrowing { mut change, looked_up, .. } = borrowing;
        if let Outcome::Leases { held } = outcome {
            change.borrowed = held.0.iter().map(|held| held.attr.ino).collect();
        }
        let waiter = Arc::clone(&change.waiter);
        if let Some(key) = fs.link.change(change) {
            waiter.moved(key);
        }
        fs.forget_lookups(looked_up);
    }

    fn fail(&self, errno: Errno) {
        let taken = self.borrowing.lock().take();
        let Some(Borrowing { change, looked_up, .. }) = taken else { return };
        change.waiter.fail(errno);
        if let Some(fs) = self.fs.upgrade() {
            fs.forget_lookups(looked_up);
        }
    }
}
