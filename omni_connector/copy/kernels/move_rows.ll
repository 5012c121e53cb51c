; clang 19, sha256 of the C 2639d2cddc5f1cd7
; scripts/compile_kernels.py has made this file.

define void @rows_to_host(ptr %packed, ptr %rows, i32 %count, i32 %words) {
entry:
  %mul = mul i32 %words, %count
  %cmp12.not = icmp eq i32 %mul, 0
  br i1 %cmp12.not, label %for.cond.cleanup, label %for.body.preheader

for.body.preheader:
  %wide.trip.count = zext i32 %mul to i64
  br label %for.body

for.cond.cleanup:
  ret void

for.body:
  %indvars.iv = phi i64 [ 0, %for.body.preheader ], [ %indvars.iv.next, %for.body ]
  %arrayidx = getelementptr <2 x i64>, ptr %packed, i64 %indvars.iv
  %0 = load <2 x i64>, ptr %arrayidx, align 16
  %1 = trunc i64 %indvars.iv to i32
  %div = udiv i32 %1, %words
  %idxprom1 = zext i32 %div to i64
  %arrayidx2 = getelementptr i64, ptr %rows, i64 %idxprom1
  %2 = load i64, ptr %arrayidx2, align 8
  %3 = inttoptr i64 %2 to ptr
  %rem = urem i32 %1, %words
  %idxprom3 = zext i32 %rem to i64
  %arrayidx4 = getelementptr <2 x i64>, ptr %3, i64 %idxprom3
  store <2 x i64> %0, ptr %arrayidx4, align 16
  %indvars.iv.next = add i64 %indvars.iv, 1
  %exitcond.not = icmp eq i64 %indvars.iv.next, %wide.trip.count
  br i1 %exitcond.not, label %for.cond.cleanup, label %for.body
}

define void @rows_from_host(ptr %packed, ptr %rows, i32 %count, i32 %words) {
entry:
  %mul = mul i32 %words, %count
  %cmp93 = icmp ugt i32 %mul, 3
  br i1 %cmp93, label %for.body.preheader, label %for.cond25.preheader

for.body.preheader:
  %0 = zext i32 %mul to i64
  br label %for.body

for.cond25.preheader.loopexit:
  %1 = trunc i64 %indvars.iv.next to i32
  br label %for.cond25.preheader

for.cond25.preheader:
  %i.0.lcssa = phi i32 [ 0, %entry ], [ %1, %for.cond25.preheader.loopexit ]
  %cmp2696 = icmp ult i32 %i.0.lcssa, %mul
  br i1 %cmp2696, label %for.body27.preheader, label %for.end33

for.body27.preheader:
  %2 = zext i32 %i.0.lcssa to i64
  %wide.trip.count = zext i32 %mul to i64
  br label %for.body27

for.body:
  %indvars.iv = phi i64 [ 0, %for.body.preheader ], [ %indvars.iv.next, %for.body ]
  %3 = or i64 %indvars.iv, 3
  %4 = trunc i64 %indvars.iv to i32
  %div.i = udiv i32 %4, %words
  %idxprom.i = zext i32 %div.i to i64
  %arrayidx.i = getelementptr i64, ptr %rows, i64 %idxprom.i
  %5 = load i64, ptr %arrayidx.i, align 8
  %6 = inttoptr i64 %5 to ptr
  %rem.i = urem i32 %4, %words
  %idxprom1.i = zext i32 %rem.i to i64
  %arrayidx2.i = getelementptr <2 x i64>, ptr %6, i64 %idxprom1.i
  %7 = load <2 x i64>, ptr %arrayidx2.i, align 16
  %8 = or i64 %indvars.iv, 1
  %9 = trunc i64 %8 to i32
  %div.i69 = udiv i32 %9, %words
  %idxprom.i70 = zext i32 %div.i69 to i64
  %arrayidx.i71 = getelementptr i64, ptr %rows, i64 %idxprom.i70
  %10 = load i64, ptr %arrayidx.i71, align 8
  %11 = inttoptr i64 %10 to ptr
  %rem.i72 = urem i32 %9, %words
  %idxprom1.i73 = zext i32 %rem.i72 to i64
  %arrayidx2.i74 = getelementptr <2 x i64>, ptr %11, i64 %idxprom1.i73
  %12 = load <2 x i64>, ptr %arrayidx2.i74, align 16
  %13 = or i64 %indvars.iv, 2
  %14 = trunc i64 %13 to i32
  %div.i75 = udiv i32 %14, %words
  %idxprom.i76 = zext i32 %div.i75 to i64
  %arrayidx.i77 = getelementptr i64, ptr %rows, i64 %idxprom.i76
  %15 = load i64, ptr %arrayidx.i77, align 8
  %16 = inttoptr i64 %15 to ptr
  %rem.i78 = urem i32 %14, %words
  %idxprom1.i79 = zext i32 %rem.i78 to i64
  %arrayidx2.i80 = getelementptr <2 x i64>, ptr %16, i64 %idxprom1.i79
  %17 = load <2 x i64>, ptr %arrayidx2.i80, align 16
  %18 = trunc i64 %3 to i32
  %div.i81 = udiv i32 %18, %words
  %idxprom.i82 = zext i32 %div.i81 to i64
  %arrayidx.i83 = getelementptr i64, ptr %rows, i64 %idxprom.i82
  %19 = load i64, ptr %arrayidx.i83, align 8
  %20 = inttoptr i64 %19 to ptr
  %rem.i84 = urem i32 %18, %words
  %idxprom1.i85 = zext i32 %rem.i84 to i64
  %arrayidx2.i86 = getelementptr <2 x i64>, ptr %20, i64 %idxprom1.i85
  %21 = load <2 x i64>, ptr %arrayidx2.i86, align 16
  %arrayidx = getelementptr <2 x i64>, ptr %packed, i64 %indvars.iv
  store <2 x i64> %7, ptr %arrayidx, align 16
  %arrayidx14 = getelementptr <2 x i64>, ptr %packed, i64 %8
  store <2 x i64> %12, ptr %arrayidx14, align 16
  %arrayidx18 = getelementptr <2 x i64>, ptr %packed, i64 %13
  store <2 x i64> %17, ptr %arrayidx18, align 16
  %arrayidx22 = getelementptr <2 x i64>, ptr %packed, i64 %3
  store <2 x i64> %21, ptr %arrayidx22, align 16
  %indvars.iv.next = add i64 %indvars.iv, 4
  %22 = or i64 %indvars.iv.next, 3
  %cmp = icmp ult i64 %22, %0
  br i1 %cmp, label %for.body, label %for.cond25.preheader.loopexit

for.body27:
  %indvars.iv103 = phi i64 [ %2, %for.body27.preheader ], [ %indvars.iv.next104, %for.body27 ]
  %23 = trunc i64 %indvars.iv103 to i32
  %div.i87 = udiv i32 %23, %words
  %idxprom.i88 = zext i32 %div.i87 to i64
  %arrayidx.i89 = getelementptr i64, ptr %rows, i64 %idxprom.i88
  %24 = load i64, ptr %arrayidx.i89, align 8
  %25 = inttoptr i64 %24 to ptr
  %rem.i90 = urem i32 %23, %words
  %idxprom1.i91 = zext i32 %rem.i90 to i64
  %arrayidx2.i92 = getelementptr <2 x i64>, ptr %25, i64 %idxprom1.i91
  %26 = load <2 x i64>, ptr %arrayidx2.i92, align 16
  %arrayidx30 = getelementptr <2 x i64>, ptr %packed, i64 %indvars.iv103
  store <2 x i64> %26, ptr %arrayidx30, align 16
  %indvars.iv.next104 = add i64 %indvars.iv103, 1
  %exitcond.not = icmp eq i64 %indvars.iv.next104, %wide.trip.count
  br i1 %exitcond.not, label %for.end33, label %for.body27

for.end33:
  ret void
}
