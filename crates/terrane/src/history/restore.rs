//! From what was read while calls went by, and what they wrote, back to the layout of the moment.

use super::log::{Image, Log, Piece};
use crate::addr::AddrRange;
use crate::error::OutOfMemory;
use alloc::vec::Vec;
use core::cmp::Reverse;

/// Where an image holds: the part of its range that no earlier image has.
#[derive(Clone, Copy)]
struct Claim {
    range: AddrRange,
    /// Which image: a lower number is an earlier one.
    rank: usize,
    image: Image,
}

/// The layout of the moment, ascending, one piece a VMA. `seen` is what was read of the index, and the notes; in any order,
/// and with any overlaps.
///
/// # Errors
/// [`OutOfMemory`].
pub fn restore(mut seen: Vec<Piece>, log: &Log) -> Result<Vec<Piece>, OutOfMemory> {
    unite(&mut seen);
    let claims = claims(log)?;
    let mut list = Layout::with_room_for(seen.len())?;
    let mut rest = seen.into_iter();
    let mut next = rest.next();
    // The claim that ends where we are.
    let mut before: Option<Claim> = None;
    for claim in claims {
        // What was read below it, and above the claim before.
        while let Some(piece) = next.filter(|piece| piece.range.start < claim.range.start) {
            list.add_seen(piece, AddrRange::new(piece.range.start, claim.range.start), before)?;
            if piece.range.end > claim.range.start {
                break;
            }
            next = rest.next();
        }
        let joined = match before.filter(|before| before.range.end == claim.range.start) {
            // The earlier of two images tells about the address where they meet.
            Some(below) if below.rank < claim.rank => below.image.joined_above,
            _ => claim.image.joined_below,
        };
        for piece in log.pieces(&claim.image).filter(|piece| piece.range.overlaps(claim.range)) {
            let piece = piece.clip(claim.range);
            list.add(piece, joined && piece.range.start == claim.range.start)?;
        }
        // What was read of the claimed range does not count.
        while next.is_some_and(|piece| piece.range.end <= claim.range.end) {
            next = rest.next();
        }
        if let Some(piece) = next.filter(|piece| piece.range.start < claim.range.end) {
            next = Some(piece.clip(AddrRange::new(claim.range.end, piece.range.end)));
        }
        before = Some(claim);
    }
    while let Some(piece) = next {
        list.add_seen(piece, piece.range, before)?;
        next = rest.next();
    }
    Ok(list.0)
}

/// A layout that is put together from below to above.
struct Layout(Vec<Piece>);

impl Layout {
    fn with_room_for(pieces: usize) -> Result<Self, OutOfMemory> {
        let mut list = Vec::new();
        list.try_reserve(pieces).map_err(|_| OutOfMemory)?;
        Ok(Self(list))
    }

    /// Adds the part in `part` of what was read, above the claim `before`.
    fn add_seen(&mut self, piece: Piece, part: AddrRange, before: Option<Claim>) -> Result<(), OutOfMemory> {
        let piece = piece.clip(part);
        let edge = before.filter(|before| before.range.end == piece.range.start);
        self.add(piece, edge.is_some_and(|before| before.image.joined_above))
    }

    /// Adds a piece above all that is there; `joined`: it is part of the VMA that ends where it starts, if there is one.
    fn add(&mut self, piece: Piece, joined: bool) -> Result<(), OutOfMemory> {
        if let Some(last) = self.0.last_mut()
            && joined
            && last.range.end == piece.range.start
            && last.is_alike(&piece)
        {
            last.range.end = piece.range.end;
            return Ok(());
        }
        self.0.try_reserve(1).map_err(|_| OutOfMemory)?;
        self.0.push(piece);
        Ok(())
    }
}

/// Sorts, and makes one of what overlaps: pieces that say the same about the addresses they share. Where they do not, an
/// image says it.
fn unite(seen: &mut Vec<Piece>) {
    seen.sort_unstable_by_key(|piece| (piece.range.start, Reverse(piece.range.end)));
    seen.dedup_by(|piece, last| {
        if piece.range.start >= last.range.end {
            return false;
        }
        if piece.range.end <= last.range.end {
            return true;
        }
        if last.is_alike(piece) {
            last.range.end = piece.range.end;
            return true;
        }
        *piece = piece.clip(AddrRange::new(last.range.end, piece.range.end));
        false
    });
}

/// What each image claims, ascending.
fn claims(log: &Log) -> Result<Vec<Claim>, OutOfMemory> {
    let mut claims: Vec<Claim> = Vec::new();
    for (rank, image) in log.images().enumerate() {
        let mut at = image.range.start;
        // The claims in the range are from `place` on.
        let mut place = claims.partition_point(|claim| claim.range.end <= at);
        while at < image.range.end {
            let next =
                claims.get(place).map_or(image.range.end, |claim| claim.range.start.min(image.range.end));
            if at < next {
                claims.try_reserve(1).map_err(|_| OutOfMemory)?;
                claims.insert(place, Claim { range: AddrRange::new(at, next), rank, image });
                place += 1;
            }
            at = claims.get(place).map_or(image.range.end, |claim| claim.range.end);
            place += 1;
        }
    }
    Ok(claims)
}
